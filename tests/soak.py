"""A soak: refits without end, under load and faults, judged by a checker that reads only the log.

    python -m tests.soak --refits 10000             # simulated engines, random faults
    python -m tests.soak --refits 300 --real        # a real tiny engine under 16 streams, versions alternating

Prints one JSON object. The checker knows nothing of the engine: it is given, for every token, which version made it
according to the stream and which weights made it in truth, and for every moment what each replica had committed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pitstop.engine import Deadlines, Fleet, Outcome, Phase, RefitOptions, SamplingParams
from pitstop.engine.errors import PitstopError
from pitstop.engine.ports import NullObserver
from pitstop.engine.refit import POLICIES
from pitstop.engine.simulated import TORN, Script, SimulatedBackend, token_for
from tests.engine.sim import SimFleet

QUICK = Deadlines(
    suspend=0.2, drain=0.5, receive=0.2, receive_per_gib=0, finalize=0.2, resume=0.2, control=0.2, silence=0.2
)
CALLS = ("suspend", "receive", "apply", "finalize", "undo", "release", "reset_cache", "resume", "label")


@dataclass
class Log:
    """What happened, as plain data."""

    tokens: int = 0
    torn: int = 0
    mislabelled: int = 0
    broken: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def stream(self, prompt: Sequence[int], chunks: Sequence[Any], end: str) -> None:
        """Check one stream of a simulated engine: contiguous, whole, and each token its version's."""
        at = 0
        for chunk in chunks:
            self.broken += chunk.start != at
            for token in chunk.token_ids:
                self.torn += token == TORN
                self.mislabelled += token != token_for(chunk.weight_version, prompt, at)
                at += 1
        self.tokens += at
        self.ends[end] += 1


def usage() -> dict[str, int]:
    """What may not grow."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "rss": resident,
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "shm": len(os.listdir("/dev/shm")),
    }


async def _consumer(engine: Fleet, log: Log, seed: int, stop: asyncio.Event) -> None:
    rng = random.Random(seed)
    n = seed * 1000
    while not stop.is_set():
        n += 1
        prompt = [n % 997, n % 13]
        chunks = []
        stream = engine.stream(prompt, SamplingParams(max_tokens=rng.randint(1, 40)))
        leave_after = rng.randint(1, 30) if rng.random() < 0.2 else None
        try:
            async with stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    if leave_after is not None and len(chunks) >= leave_after:
                        break
            end = str(stream.finish_reason)
        except PitstopError as error:
            end = error.slug
            await asyncio.sleep(0.001)
        log.stream(prompt, chunks, end)


async def _heal(engine: SimFleet) -> None:
    """Bring dead replicas back, as an operator would."""
    for sim in engine.sims:
        sim.script.faults.clear()
    engine.transport.script.faults.clear()
    with contextlib.suppress(PitstopError):
        await engine.restart()


async def simulated(refits: int, seed: int = 0, replicas: int = 3, consumers: int = 12) -> dict[str, Any]:
    """Run `refits` refits on simulated engines with random faults."""
    rng, log = random.Random(seed), Log()
    async with SimFleet([SimulatedBackend() for _ in range(replicas)], NullObserver()) as engine:
        stop = asyncio.Event()
        tasks = [asyncio.create_task(_consumer(engine, log, n, stop)) for n in range(consumers)]
        before: dict[str, int] = {}
        began = time.monotonic()
        for version in range(1, refits + 1):
            script = Script()
            if rng.random() < 0.3:
                sim = rng.choice(engine.sims)
                kind = rng.choice(["call", "call", "call", "die", "land", "send"])
                if kind == "call":
                    sim.script.plan(rng.choice(CALLS), rng.choice(["raise", "raise", "raise", "hang"]))
                elif kind == "die":
                    sim.die()
                elif kind == "land":
                    engine.transport.script.plan("land", rng.choice(["raise", "hang"]))
                else:
                    script.plan("send", rng.choice(["raise", "hang"]))
            options = RefitOptions(policy=rng.choice(POLICIES), deadlines=QUICK)
            try:
                report = await asyncio.wait_for(_report(engine.refit_to(version, options, script=script)), 30)
                log.outcomes[report.value] += 1
            except PitstopError as error:
                log.outcomes[error.slug] += 1
            if any(r.phase is Phase.DEAD for r in engine.replicas):
                await _heal(engine)
            if version == max(1, refits // 10):
                before = usage()
        after = usage()
        await _heal(engine)
        assert (await engine.refit_to(refits + 1)).outcome is Outcome.COMMITTED
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert all(not sim.legs for sim in engine.sims)
    return _summary("simulated", refits, time.monotonic() - began, log, before, after)


async def _report(handle: Any) -> Outcome:
    return (await handle).outcome  # type: ignore[no-any-return]


async def real(refits: int, consumers: int = 16) -> dict[str, Any]:
    """Run `refits` refits of a real tiny engine between two checkpoints under greedy streams.

    Greedy tokens of each version are known from engines that only ever had that version, so that a token of any
    mixture would show: a completion made whole by one version must equal that version's, and one that spans several
    must equal its first version's up to the first swap.
    """
    from benchmarks.engines import fast_engine, tiny_checkpoint

    log = Log()
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    prompts = [[n + 1, n + 2, n + 3] for n in range(consumers)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [tiny_checkpoint(Path(folder), seed=seed) for seed in (0, 1)]
        truth: list[list[list[int]]] = []
        for path in paths:
            async with fast_engine(path, max_model_len=256) as engine:
                truth.append([list((await engine.generate(p, params)).token_ids) for p in prompts])
        async with fast_engine(paths[0], max_model_len=256) as engine:
            stop = asyncio.Event()

            async def consumer(n: int) -> None:
                while not stop.is_set():
                    done = await engine.generate(prompts[n], params)
                    first = done.spans[0]
                    wanted = truth[first.weight_version % 2][n][: first.end]
                    log.torn += list(done.token_ids[: first.end]) != wanted
                    log.broken += [s.start for s in done.spans[1:]] != [s.end for s in done.spans[:-1]]
                    log.tokens += len(done.token_ids)
                    log.ends[done.finish_reason] += 1

            tasks = [asyncio.create_task(consumer(n)) for n in range(consumers)]
            before: dict[str, int] = {}
            began = time.monotonic()
            for version in range(1, refits + 1):
                policy = POLICIES[version % 2]  # keep, recompute: the ones that continue across a swap
                report = await engine.refit(paths[version % 2], weight_version=version, policy=policy)
                log.outcomes[report.outcome.value] += 1
                if version == max(1, refits // 10):
                    before = usage()
            after = usage()
            stop.set()
            await asyncio.gather(*tasks)
    return _summary("real", refits, time.monotonic() - began, log, before, after)


def _summary(
    kind: str, refits: int, seconds: float, log: Log, before: dict[str, int], after: dict[str, int]
) -> dict[str, Any]:
    return {
        "soak": kind, "refits": refits, "seconds": round(seconds, 1), "tokens": log.tokens, "torn": log.torn,
        "mislabelled": log.mislabelled, "broken": log.broken, "ends": dict(log.ends), "outcomes": dict(log.outcomes),
        "after_a_tenth": before, "at_the_end": after,
    }  # fmt: skip


def main() -> None:
    """Run and judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--refits", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    found = asyncio.run(real(args.refits) if args.real else simulated(args.refits, args.seed))
    print(json.dumps(found, indent=1))  # noqa: T201
    bad = found["torn"] or found["mislabelled"] or found["broken"]
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
