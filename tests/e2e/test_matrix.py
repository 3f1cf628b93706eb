"""Cores of real engines, and trainers that send to them, killed or frozen at a step: as in `tests/transports/pits.py`.

A core is struck at the moment at which its replica is told to begin a step, before the order reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine import Outcome, Phase, PitstopError, RolloutEngine, SamplingParams
from pitstop.engine.handle import RefitHandle
from pitstop.engine.ports import NullObserver, Transition
from pitstop.engine.worker_ports import Trailer
from tests.conftest import Checkpoint
from tests.transports.children import descriptors
from tests.transports.pits import ticking
from tests.transports.struck import Peer, peer, train

LIMITS = {"suspend": 5.0, "receive": 2.5, "finalize": 1.5, "resume": 1.5, "control": 2.2, "silence": 1.5}
OVER = 2.0
LAG = 0.5
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=480, temperature=0.0, ignore_eos=True)
STEPS = {Phase.RECEIVING: "apply", Phase.FINALIZING: "finalize", Phase.RESUMING: "resume"}


class Watched(NullObserver):
    """Calls `at` with each step of the first replica's way through a refit."""

    def __init__(self) -> None:
        self.at: Callable[[str], None] = lambda _: None

    def transition(self, change: Transition) -> None:
        if change.replica == "replica-0" and change.refit_id is not None and change.after in STEPS:
            self.at(STEPS[change.after])


class Engine(RolloutEngine):
    """Remembers handles, and tells of a trailer that is passed on."""

    watched: Watched
    handles: dict[int, RefitHandle]

    def offer(self, make: Any, options: Any, handle: RefitHandle, **more: Any) -> RefitHandle:
        self.handles[handle.weight_version] = handle
        return super().offer(make, options, handle, **more)


@contextlib.asynccontextmanager
async def started(model: Path) -> AsyncIterator[Engine]:
    args = {
        "enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20,
        "block_size": 32, "max_num_seqs": 16,
    }  # fmt: skip
    watched = Watched()
    engine: Any = Engine.launch(model, replicas=2, engine_args=args, start_method="fork", observer=watched)
    engine.watched, engine.handles = watched, {}
    seal = engine._coordinator._transport.seal

    async def sealed(trailer: Trailer) -> None:
        watched.at("sent")
        await seal(trailer)

    engine._coordinator._transport.seal = sealed
    async with engine:
        pids = [replica.booted.pid for replica in engine.replicas]
        yield engine
        pids += [replica.booted.pid for replica in engine.replicas]
    assert not engine._run_dir.path.exists()
    assert not [pid for pid in pids if _runs(pid)]


def freeze(pid: int) -> None:
    """Stop a process, and return when none of its threads runs: the signal waits for its main thread to be scheduled.

    Until then its others could still do what they are told to after this.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any(_state(task / "stat") != "T" for task in tasks.iterdir()):
        time.sleep(0.0005)


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def _runs(pid: int) -> bool:
    """A zombie has let go of everything: Python reaps it when it next starts a process."""
    with contextlib.suppress(OSError):
        return _state(Path(f"/proc/{pid}/stat")) != "Z"
    return False


async def report_of(engine: Engine, version: int) -> Any:
    async with asyncio.timeout(20):
        while version not in engine.handles:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        with contextlib.suppress(PitstopError):
            await engine.handles[version]
    return engine.handles[version].report


class Busy:
    """Long requests, one after the other, on both replicas; counts the tokens of the second."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.made = 0
        self.lost: list[str] = []
        self._tasks = [asyncio.create_task(self._read(n)) for n in range(2)]

    async def _read(self, n: int) -> None:
        while True:
            try:
                stream = self._engine.stream([97 + n], LONG)
                async for chunk in stream:
                    there = stream.request_id in self._engine.replicas[1].flights
                    self.made += len(chunk.token_ids) if there else 0
            except PitstopError as error:
                self.lost.append(error.slug)
                await asyncio.sleep(0.02)

    async def __aenter__(self) -> Busy:
        await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def same_everywhere(engine: Engine, version: int) -> list[int]:
    """Every replica makes the same tokens with the same version."""
    async with asyncio.timeout(20):
        done = await asyncio.gather(*(engine.generate([97, 98, 99], SHORT) for _ in range(6)))
    assert {completion.replica for completion in done} == {"replica-0", "replica-1"}
    assert {completion.spans for completion in done} == {((version, 0, 8),)}
    assert len({tuple(completion.token_ids) for completion in done}) == 1
    return list(done[0].token_ids)


async def publish(trainer: Peer, version: int, path: Path, at: int = -1) -> None:
    trainer.pipe.send((version, at, False, str(path)))


@pytest.mark.parametrize(
    ("how", "where", "slugs", "seconds"),
    [
        ("kill", "sent", {"replica_died", "peer_lost"}, 0.0),
        ("kill", "apply", {"replica_died"}, 0.0),
        ("kill", "finalize", {"replica_died"}, 0.0),
        ("kill", "resume", {"replica_died"}, 0.0),
        ("stop", "sent", {"peer_lost"}, LIMITS["silence"]),
        ("stop", "apply", {"deadline_exceeded"}, LIMITS["receive"]),
        ("stop", "finalize", {"deadline_exceeded"}, LIMITS["finalize"]),
        ("stop", "resume", {"deadline_exceeded"}, LIMITS["control"]),
    ],
)
async def test_a_core_that_is_struck_at_a_step_is_one_typed_error_and_the_other_replica_commits(
    checkpoint: Checkpoint, preloaded: None, how: str, where: str, slugs: set[str], seconds: float
) -> None:
    files = descriptors()
    async with started(checkpoint("llama", 0)) as engine, peer(train, engine.address, LIMITS) as trainer:
        assert await trainer.told() == "connected"
        old = await same_everywhere(engine, 0)
        pid = engine.replicas[0].booted.pid  # type: ignore[union-attr]
        assert pid is not None
        struck: list[float] = []

        def strike(step: str) -> None:
            if step == where and not struck:
                struck.append(time.monotonic())
                if how == "stop":
                    freeze(pid)
                else:
                    os.kill(pid, signal.SIGKILL)

        engine.watched.at = strike
        async with Busy(engine) as busy:
            with ticking() as stall:
                await publish(trainer, 1, checkpoint("llama", 1))
                report = await report_of(engine, 1)
                took = time.monotonic() - struck[0]
            made = busy.made
            assert took < seconds + OVER
            assert stall() < LAG
            assert report.outcome is Outcome.PARTIAL
            error = report.replicas["replica-0"].error
            assert error.slug in slugs
            assert {"replica", "phase"} <= set(error.fields) or error.slug != "deadline_exceeded"
            assert report.replicas["replica-1"].committed
            assert await trainer.told(OVER) == ("partial", "", {"replica-0": error.slug})
            assert engine.replicas[1].weight_version == 1
            await asyncio.sleep(0.1)
            assert busy.made > made
            # A replica that was struck before anything of it had changed goes on as it was; others have proven nothing.
            assert engine.replicas[0].weight_version == (0 if (how, where) == ("stop", "sent") else None)
            if how == "kill":
                async with asyncio.timeout(5):
                    await engine.replicas[0].reached(frozenset({Phase.DEAD}))
                await engine.restart()
            else:
                assert engine.replicas[0].phase is (Phase.SERVING if where == "sent" else Phase.QUARANTINED)
                os.kill(pid, signal.SIGCONT)
            await publish(trainer, 2, checkpoint("llama", 1))
            assert await trainer.told() == ("committed", "", {})
        new = await same_everywhere(engine, 2)
        assert new != old
        await publish(trainer, 3, checkpoint("llama", 0))
        assert await trainer.told() == ("committed", "", {})
        assert await same_everywhere(engine, 3) == old
    await asyncio.sleep(0.2)
    assert descriptors() == files


@pytest.mark.parametrize(("how", "seconds"), [("kill", 0.0), ("stop", LIMITS["silence"]), ("mute", LIMITS["receive"])])
async def test_a_trainer_that_is_struck_while_it_sends_costs_a_real_engine_nothing(
    checkpoint: Checkpoint, preloaded: None, how: str, seconds: float
) -> None:
    async with started(checkpoint("llama", 0)) as engine:
        old = await same_everywhere(engine, 0)
        async with Busy(engine) as busy, peer(train, engine.address, LIMITS) as trainer:
            assert await trainer.told() == "connected"
            await publish(trainer, 1, checkpoint("llama", 1), at=5)
            assert await trainer.told() == "held"
            began, made = time.monotonic(), busy.made
            trainer.strike(how)
            report = await report_of(engine, 1)
            assert time.monotonic() - began < seconds + OVER
            assert report.outcome is Outcome.FAILED
            assert report.error.slug == ("deadline_exceeded" if how == "mute" else "peer_lost")
            assert busy.made > made
        async with peer(train, engine.address, LIMITS) as another:
            assert await another.told() == "connected"
            assert busy.lost == []
            assert await same_everywhere(engine, 0) == old
            await publish(another, 2, checkpoint("llama", 1))
            assert await another.told() == ("committed", "", {})
        assert await same_everywhere(engine, 2) != old
