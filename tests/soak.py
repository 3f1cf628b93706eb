"""A soak: refits without end, under load and faults, judged by an independent checker and by what may not grow.

    python -m tests.soak --refits 10000             # simulated engines, random faults
    python -m tests.soak --refits 300 --real        # a real tiny engine under 16 streams, killed now and then

Prints one JSON object; the exit status is 1 if the checker found an offence, something hung, or something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pitstop.engine.actions
import pitstop.engine.fleet
from pitstop.engine import Completion, Deadlines, Fleet, Outcome, Phase, Recovery, RefitOptions, SamplingParams
from pitstop.engine.errors import NotServing, PitstopError
from pitstop.engine.refit import POLICIES
from pitstop.engine.simulated import Delays, Script, SimulatedBackend, token_for
from pitstop.engine.vllm_backend.processes import descendants
from tests.checker import Checker
from tests.engine.sim import SimFleet, until

QUICK = Deadlines(
    suspend=0.2, drain=0.5, receive=0.2, receive_per_gib=0, finalize=0.2, resume=0.2, control=0.2, silence=0.2
)
CALLS = ("suspend", "receive", "apply", "finalize", "undo", "release", "reset_cache", "resume", "label", "submit")
PATIENCE = 60.0
"""Seconds after which a refit or a request counts as hung."""


def usage(pids: Sequence[int] = ()) -> dict[str, int]:
    """What may not grow: here, and in the processes of the engine."""
    gc.collect()
    here = {
        "rss": _resident("self"),
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "threads": len(os.listdir("/proc/self/task")),
        **_shared_memory(),
    }
    for pid in pids:
        with contextlib.suppress(OSError):
            here |= {"engine_rss": _resident(pid), "engine_fds": len(os.listdir(f"/proc/{pid}/fd"))}
    return here


_seen: set[str] = set()


def _shared_memory() -> dict[str, int]:
    """What this process and its children use of /dev/shm, and what they have used and left there.

    Others use /dev/shm too, and nothing there says whose it is.
    """
    used = set()
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            used |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    _seen.update(path for path in used if not path.endswith(" (deleted)"))
    return {"shm": len(used), "shm_left": sum(1 for path in _seen - used if os.path.exists(path))}


def _resident(pid: int | str) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Record:
    """Outcomes, and samples of `usage` by refits done."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)

    def sample(self, done: int, refits: int, pids: Sequence[int] = ()) -> None:
        """Take a sample at the start, and after every twentieth part of the run."""
        if done in (0, refits) or done % max(1, refits // 20) == 0:
            self.samples.append((done, usage(pids)))

    def summary(self, kind: str, refits: int, seconds: float, checker: Checker) -> dict[str, Any]:
        settled = [(n, u) for n, u in self.samples if n >= refits / 10]
        shown = [self.samples[0], settled[0], settled[len(settled) // 2], settled[-1]]
        return {
            "soak": kind, "refits": refits, "seconds": round(seconds, 1), "tokens": checker.tokens,
            "events": checker.events, "offences": dict(checker.offences), "examples": checker.examples,
            "hung": self.hung, "ends": dict(checker.ends), "outcomes": dict(self.outcomes),
            "faults": dict(self.faults), "counts": dict(sorted(checker.counts.items())),
            "recovery_seconds": sorted(round(s, 1) for s in self.recoveries),
            "usage": {str(n): u for n, u in shown},
            "slope_per_1000_refits": {name: slope(settled, name) for name in settled[0][1]},
        }  # fmt: skip


def slope(samples: Sequence[tuple[int, dict[str, int]]], name: str) -> float:
    """Least squares over all samples but the first tenth of the run."""
    points = [(n, u[name]) for n, u in samples if name in u]
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return round(1000 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 3) if spread else 0.0


def grown(found: dict[str, Any]) -> list[str]:
    """Name what is not flat: more than a fiftieth of memory, or anything at all of what is counted, over the run."""
    usages = list(found["usage"].values())
    first, last = usages[1], usages[-1]
    out = [k for k in ("fds", "shm", "shm_left", "engine_fds") if k in first and last.get(k, 0) > first[k] + 2]
    out += [k for k in ("tasks", "threads") if last[k] > first[k] + 8]
    return out + [k for k in ("rss", "engine_rss") if k in first and last.get(k, 0) > 1.02 * first[k] + (4 << 20)]


# -- simulated ---------------------------------------------------------------------------------------------


async def _consumer(engine: Fleet, checker: Checker, record: Record, seed: int, stop: asyncio.Event) -> None:
    rng = random.Random(seed)
    n = seed * 1000
    while not stop.is_set():
        n += 1
        prompt = [n % 997, n % 13]
        chunks: list[tuple[int, int, Sequence[int]]] = []
        stream = engine.stream(prompt, SamplingParams(max_tokens=rng.randint(1, 40)))
        leave_after = rng.randint(1, 30) if rng.random() < 0.2 else None
        try:
            async with asyncio.timeout(PATIENCE), stream:
                async for chunk in stream:
                    chunks.append((chunk.weight_version, chunk.start, chunk.token_ids))
                    if leave_after is not None and len(chunks) >= leave_after:
                        break
            end = str(stream.finish_reason)
        except PitstopError as error:
            end = error.slug
            if isinstance(error, NotServing):
                phases = sorted(r.phase.value for r in engine.replicas)
                checker.counts[f"not serving with {' '.join(phases)}"] += 1
            await asyncio.sleep(0.001)
        except TimeoutError:
            end = "hung"
            record.hung.append(f"request {stream.request_id}")
        checker.stream(prompt, chunks, end)


def _strike(engine: SimFleet, rng: random.Random) -> tuple[str, Script]:
    """Plan one fault; return its name, and the script of the trainer."""
    script, sim = Script(), rng.choice(engine.sims)
    kind = rng.choice(["call"] * 8 + ["die"] * 2 + ["land", "land", "send", "send", "freeze", "boot"])
    how = rng.choice(["raise", "raise", "raise", "hang", "die"])
    if kind == "call":
        call = rng.choice(CALLS)
        sim.script.plan(call, how)  # type: ignore[arg-type]
        return f"{call} {how}", script
    if kind in ("die", "boot"):
        if kind == "boot":
            sim.script.plan("start", "raise")
        sim.die()
    elif kind == "freeze":
        # Alive and silent: it makes no token and answers no call until it is given up.
        sim.paused = True
        sim.script.plan("describe", "hang")
    elif kind == "land":
        engine.transport.script.plan("land", "hang" if how == "die" else how)  # type: ignore[arg-type]
    else:
        script.plan("send", "hang" if how == "die" else how)  # type: ignore[arg-type]
    return kind, script


async def simulated(
    refits: int, seed: int = 0, replicas: int = 3, consumers: int = 12, mode: str = "auto"
) -> dict[str, Any]:
    """Run `refits` refits on simulated engines with random faults of engines, receivers and trainers."""
    # What hangs costs ten seconds otherwise.
    pitstop.engine.actions._SETTLE = 0.3
    pitstop.engine.fleet.SUBMIT_SECONDS = 0.5
    rng, record = random.Random(seed), Record()
    checker = Checker(token_for, refits + 2)
    recovery = Recovery(attempts=10**9, backoff=0.02, longest=0.1, deadlines=QUICK)
    backends = [SimulatedBackend(delays=Delays(step=0.001)) for _ in range(replicas)]
    began = time.monotonic()
    async with SimFleet(backends, checker, recovery=recovery) as engine:
        for replica in engine.replicas:
            replica.silence = 0.4
        stop = asyncio.Event()
        tasks = [asyncio.create_task(_consumer(engine, checker, record, n, stop)) for n in range(consumers)]
        record.sample(0, refits)
        for version in range(1, refits + 1):
            script = Script()
            if rng.random() < 0.3:
                name, script = _strike(engine, rng)
                record.faults[name] += 1
            options = RefitOptions(policy=rng.choice(POLICIES), deadlines=QUICK, mode=mode)  # type: ignore[arg-type]
            handle = engine.refit_to(version, options, script=script)
            try:
                async with asyncio.timeout(PATIENCE):
                    if rng.random() < 0.02:
                        with contextlib.suppress(PitstopError):
                            await engine.recover(deadlines=QUICK)  # by hand, while it goes on by itself
                    if rng.random() < 0.01:
                        with contextlib.suppress(PitstopError):
                            await engine.sleep(rng.choice([1, 2]))
                        with contextlib.suppress(PitstopError):
                            await engine.wake_up()
                    record.outcomes[(await handle).outcome.value] += 1
            except PitstopError as error:
                record.outcomes[error.slug] += 1
            except TimeoutError:
                record.outcomes["hung"] += 1
                record.hung.append(repr(handle))
            if rng.random() < 0.1:
                # The trainer thinks: what is lost comes back without its next refit, if anything is at hand.
                with contextlib.suppress(TimeoutError):
                    await until(lambda: all(r.phase is Phase.SERVING for r in engine.replicas), 1.0)
            if version % 10 == 0:
                # Faults that were planned and never met would pile up; what is asleep for a failure of `wake` wakes.
                for sim in engine.sims:
                    sim.script.faults.clear()
                engine.transport.script.faults.clear()
            record.sample(version, refits)
        for sim in engine.sims:
            sim.script.faults.clear()
        engine.transport.script.faults.clear()
        async with asyncio.timeout(PATIENCE):
            await until(lambda: all(r.phase is Phase.SERVING for r in engine.replicas), PATIENCE)
            last = await engine.refit_to(refits + 1)
            assert last.outcome is Outcome.COMMITTED, last
            stop.set()
            await asyncio.gather(*tasks)
        assert all(not sim.legs for sim in engine.sims)
        assert all(not replica.flights for replica in engine.replicas)
    checker.finish()
    return record.summary("simulated", refits, time.monotonic() - began, checker)


# -- real --------------------------------------------------------------------------------------------------


def _chunks(done: Completion) -> list[tuple[int, int, Sequence[int]]]:
    return [(s.weight_version, s.start, done.token_ids[s.start : s.end]) for s in done.spans]


def _say_where_they_are() -> None:
    """Have this process and its children write where each of their threads is."""
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):
            sys.stderr.write(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}\n")
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)


async def real(
    refits: int, consumers: int = 16, mode: str = "auto", start_method: str = "spawn", kill_every: int = 25
) -> dict[str, Any]:
    """Run `refits` refits of a real tiny engine between two checkpoints under greedy streams.

    What each version makes of each prompt is known from engines that only ever had that version. So every token of a
    stream's first version is checked, and after the run a sample of streams that span two is checked whole: under
    `recompute` the rest must be what the second version makes of the prompt and the tokens before the swap.

    Every so often the engine is killed in the middle of a refit and comes back by itself.
    """
    from benchmarks.engines import fast_engine, tiny_checkpoint

    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    prompts = [[n + 1, n + 2, n + 3] for n in range(consumers)]
    record, rng = Record(), random.Random(0)
    spanning: list[tuple[int, list[int], list[int], int]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [tiny_checkpoint(Path(folder), "llama", seed=seed) for seed in (0, 1)]
        truths: list[list[list[int]]] = []
        args: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "start_method": start_method}
        for path in paths:
            async with fast_engine(path, **args) as engine:
                truths.append([list((await engine.generate(p, params)).token_ids) for p in prompts])
        first: dict[int, int] = {}

        def truth(version: int, prompt: Sequence[int], index: int) -> int | None:
            return truths[version % 2][prompt[0] - 1][index] if version == first[prompt[0]] else None

        checker = Checker(truth, refits + 1)
        engine = fast_engine(
            paths[0], observer=checker, recovery=Recovery(attempts=10**9, backoff=0.1, longest=0.5), **args
        )
        async with engine:
            stop = asyncio.Event()
            policies: dict[int, str] = {}

            async def consumer(n: int) -> None:
                while not stop.is_set():
                    try:
                        # Beyond what the start of an engine takes where others use the machine too.
                        async with asyncio.timeout(2 * PATIENCE):
                            done = await anext(engine.generate_async([prompts[n]], params))
                    except TimeoutError:
                        record.hung.append(f"request of consumer {n}")
                        continue
                    completion = done[1]
                    chunks = _chunks(completion)
                    if chunks:
                        first[prompts[n][0]] = chunks[0][0]
                    checker.stream(prompts[n], chunks, completion.error.slug if completion.error else "length")
                    if len(chunks) == 2 and len(spanning) < 64 and policies.get(chunks[1][0]) == "recompute":
                        spanning.append((chunks[1][0], prompts[n], list(completion.token_ids), chunks[1][1]))

            def pids() -> list[int]:
                booted = engine.replicas[0].booted
                return [booted.pid] if booted is not None and booted.pid is not None else []

            tasks = [asyncio.create_task(consumer(n)) for n in range(consumers)]
            record.sample(0, refits, pids())
            began = time.monotonic()
            for version in range(1, refits + 1):
                policies[version] = POLICIES[version % 2]  # keep, recompute: those that continue across a swap
                handle = engine.refit(paths[version % 2], weight_version=version, policy=policies[version])  # type: ignore[arg-type]
                killed_at = 0.0
                if version % kill_every == 0:
                    await asyncio.sleep(rng.uniform(0, 0.1))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pids()[0], signal.SIGKILL)
                    killed_at = time.monotonic()
                    record.faults["kill"] += 1
                try:
                    async with asyncio.timeout(PATIENCE):
                        record.outcomes[(await handle).outcome.value] += 1
                except PitstopError as error:
                    record.outcomes[error.slug] += 1
                except TimeoutError:
                    record.hung.append(repr(handle))
                try:
                    async with asyncio.timeout(2 * PATIENCE):
                        await engine.replicas[0].reached(frozenset({Phase.SERVING}))
                except TimeoutError:
                    record.hung.append(f"recovery before version {version + 1}: {engine.replicas[0]!r}")
                    _say_where_they_are()
                    break
                if killed_at:
                    record.recoveries.append(time.monotonic() - killed_at)
                _shared_memory()
                record.sample(version, refits, pids())
            stop.set()
            await asyncio.gather(*tasks)
        checker.finish()
        seconds = time.monotonic() - began
        for n, path in enumerate(paths):
            async with fast_engine(path, **args) as engine:
                for version, prompt, tokens, swap in spanning:
                    if version % 2 == n:
                        rest = SamplingParams(max_tokens=len(tokens) - swap, temperature=0.0, ignore_eos=True)
                        fresh = await engine.generate([*prompt, *tokens[:swap]], rest)
                        checker.counts["streams checked across a swap"] += 1
                        if list(fresh.token_ids) != tokens[swap:]:
                            checker.offence("torn or mislabelled token", f"after the swap to version {version}")
    return record.summary("real", refits, seconds, checker)


def main() -> None:
    """Run and judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--refits", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--start-method", default="spawn", choices=("spawn", "fork"), help="of real engines")
    parser.add_argument("--kill-every", type=int, default=25, help="real: refits between two kills")
    parser.add_argument("--mode", default="auto", help="where versions are received: a refit's `mode`")
    args = parser.parse_args()
    if args.real:
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # inherited by what is forked
        run = real(args.refits, mode=args.mode, start_method=args.start_method, kill_every=args.kill_every)
    else:
        run = simulated(args.refits, args.seed, mode=args.mode)
    found = asyncio.run(run)
    found["grown"] = grown(found)
    print(json.dumps(found, indent=1))  # noqa: T201
    raise SystemExit(bool(found["offences"] or found["hung"] or found["grown"]))


if __name__ == "__main__":
    main()
