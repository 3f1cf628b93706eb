"""Staging in a whole engine: superseded at any step it frees what it took, and spans and reports say where and why."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine import Outcome, SamplingParams
from pitstop.engine.errors import WorkerFailed
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Booted, NullObserver, Scalar
from pitstop.engine.refit import Deadlines
from pitstop.engine.worker_ports import WorkerOp, WorkerReply
from pitstop.transports import Publisher, cuda_ring, lent_draining
from pitstop.transports.draining import HostDrainer
from pitstop.transports.lent_draining import DeviceDrainer, LockedDrainer
from pitstop.transports.room import Buffers
from pitstop.transports.spare import Spare, spare
from tests.transports import lent
from tests.transports.rig import until
from tests.transports.test_publisher import settled, shas
from tests.transports.weights import slow, weights
from tests.transports.wired import Wired

FIVE = SamplingParams(max_tokens=5)
SPARE = {"device": 2 << 30, "host": 0, "ring": None}
CRAWL = Buffers(most_nbytes=0, slots=2, slot_nbytes=2048)
PACED = Buffers(device_slots=2, device_slot_nbytes=2048, stage_nbytes_per_s=1)


class Watched(NullObserver):
    def __init__(self) -> None:
        self.ended: list[Mapping[str, Scalar]] = []

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        if key.startswith("refit:"):
            self.ended.append(detail or {})


class Engine(Wired):
    """Its rank is on the GPU that `lent` makes believe in, with so much of its memory to spare; on none if None.

    As vLLM's workers do, it waits for no receiver that is told to let go.
    """

    def __init__(self, spare_nbytes: int | None, **options: Any) -> None:
        super().__init__(**options)
        workers, answer = self.sim._workers, self.sim.call_workers

        async def quickly(op: WorkerOp) -> Sequence[WorkerReply]:
            if op.verb == "release" and (worker := workers.pop(op.refit_id, None)) is not None:
                threading.Thread(target=worker.release).start()
            return await answer(op)

        self.sim.call_workers = quickly  # type: ignore[method-assign]
        if spare_nbytes is not None:
            start, call_workers, room = self.sim.start, self.sim.call_workers, spare_nbytes

            async def started(replica: str, incarnation: int) -> Booted:
                booted = await start(replica, incarnation)
                return replace(booted, layout=tuple(replace(r, device_id=lent.GPU) for r in booted.layout))

            async def called(op: WorkerOp) -> Sequence[WorkerReply]:
                replies = await call_workers(op)
                return [replace(r, layout=lent.layout(r.rank, 1, 0, room)) for r in replies]

            self.sim.start = started  # type: ignore[method-assign]
            self.sim.call_workers = called  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield
    lent.RINGS.clear()
    spare.drop()
    assert spare._claimed == {}


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces of memory for a version there were, whenever another one was taken."""
    made: list[weakref.ref[Any]] = []
    seen: list[int] = []

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*arguments: Any, **more: Any) -> Any:
            memory = make(*arguments, **more)
            others = {id(ref()) for ref in made if ref() is not None} - {id(memory)}
            made.append(weakref.ref(memory))
            seen.append(len(others))
            return memory

        return taking

    monkeypatch.setattr(Spare, "take", counted(Spare.take))
    monkeypatch.setattr(cuda_ring, "_buffer", counted(cuda_ring._buffer))
    return seen


def engine_of(staging: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    if staging != "ring":
        lent.pretend(monkeypatch)
    return Engine(SPARE[staging], buffers=CRAWL if staging == "ring" else PACED, **options)


@pytest.mark.parametrize("moment", ["offered", "claimed", "drained"])
@pytest.mark.parametrize("staging", SPARE)
async def test_a_version_that_is_superseded_while_it_is_staged_is_gone_before_the_newer_one_is(
    staging: str, moment: str, alive: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, begun = Watched(), threading.Event()
    monkeypatch.setattr(lent_draining, "_STEP_S", 0.2)  # it hears that it is to give up so much later
    async with (
        engine_of(staging, monkeypatch, observer=watched) as engine,
        await Publisher.connect_async(engine.address) as trainer,
    ):
        for version in (1, 3):
            begun.clear()
            what = slow(begun.set) if staging == "ring" else weights(version)
            first = trainer.publish(what, weight_version=version)
            if moment != "offered":
                await until(lambda: bool(spare._claimed))
            if moment == "drained":
                await until(begun.is_set if staging == "ring" else lambda: drained(engine) > 0)
            second = trainer.publish(weights(version + 1), weight_version=version + 1, deadlines={"receive": 6.0})
            assert (await settled(second)).outcome is Outcome.COMMITTED
            assert (await settled(first)).outcome is Outcome.SUPERSEDED
            assert engine.sim.content == shas(weights(version + 1))
        assert set(alive) == {0}
        assert engine.replicas[0].phase is Phase.SERVING
        assert (await engine.generate([1], FIVE)).spans == ((4, 0, 5),)
    staged = [found for found in watched.ended if found["outcome"] == "committed"]
    assert {found["staging"] for found in staged} == {"host" if staging == "ring" else staging}


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
async def test_a_version_that_is_superseded_in_one_segment_leaves_one_segment_and_no_mapping_of_another() -> None:
    begun = threading.Event()
    async with Wired() as engine, await Publisher.connect_async(engine.address) as trainer:
        for version in (1, 3, 5):
            begun.clear()
            first = trainer.publish(slow(begun.set), weight_version=version)
            await until(begun.is_set)
            second = trainer.publish(weights(version + 1), weight_version=version + 1)
            assert (await settled(second)).outcome is Outcome.COMMITTED
            assert (await settled(first)).outcome is Outcome.SUPERSEDED
            assert engine.sim.content == shas(weights(version + 1))
            await until(lambda: len(segments()) == 1)


def segments() -> set[str]:
    """Segments for weights that this process has open or mapped, by inode."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = {line[4] for line in lines if line[5:6] == ["/memfd:pitstop"]}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/memfd:pitstop ("):
                found.add(str(fd.stat().st_ino))
    return found


@pytest.mark.parametrize("staging", ["device", "host"])
async def test_the_report_and_the_span_say_where_it_waited_and_why_on_both_ends(
    staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = {"device": "of which 2.00 GiB are free", "host": "staging needs 1.00 GiB: it waits in host memory"}[staging]
    watched = Watched()
    buffers = Buffers(device_slots=2, device_slot_nbytes=2048)
    lent.pretend(monkeypatch)
    async with Engine(SPARE[staging], buffers=buffers, observer=watched) as engine:
        report = await engine.refit(weights(1).items(), weight_version=1)
        assert (report.mode, report.staging) == ("staged", staging)
        assert why in report.staging_reason
        async with await Publisher.connect_async(engine.address) as trainer:
            told = await settled(trainer.publish(weights(2), weight_version=2))
            assert (told.mode, told.staging) == ("staged", staging)
            assert why in told.staging_reason
    assert [(found["staging"], why in str(found["staging_reason"])) for found in watched.ended] == [(staging, True)] * 2


async def test_without_a_gpu_the_report_says_that_it_lay_in_shared_memory_or_was_taken_out_of_the_ring() -> None:
    for buffers, staging in ((Buffers(), "shared_memory"), (CRAWL, "host")):
        async with Wired(buffers=buffers) as engine:
            report = await engine.refit(weights(1).items(), weight_version=1)
            assert (report.staging, "GiB" in report.staging_reason) == (staging, True)
            report = await engine.refit(weights(2).items(), weight_version=2, mode="in_place")
            assert (report.staging, report.staging_reason) == ("none", "asked for")


@pytest.mark.parametrize("staging", SPARE)
async def test_what_fails_while_it_is_staged_costs_nothing(staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every way through a ring, at its start and in its middle: the old version serves, and the next one comes."""
    async with engine_of(staging, monkeypatch) as engine:
        for version, strike in ((1, 1), (3, 6)):
            with monkeypatch.context() as patch:
                break_at(strike, patch, staging)
                with pytest.raises(WorkerFailed, match="scripted: the copy fails"):
                    await engine.refit(
                        weights(version).items(), weight_version=version, deadlines=Deadlines(receive=6.0)
                    )
            assert engine.replicas[0].phase is Phase.SERVING
            assert (await engine.generate([1], FIVE)).spans == ((version - 1, 0, 5),)
            report = await engine.refit(
                weights(version + 1).items(), weight_version=version + 1, deadlines=Deadlines(receive=6.0)
            )
            assert report.outcome is Outcome.COMMITTED
            assert engine.sim.content == shas(weights(version + 1))


def drained(engine: Engine) -> int:
    """How many buckets are in the receivers' own memory."""
    refits = engine._coordinator._transport._refits  # type: ignore[attr-defined]
    return max((refit.ring.drained for refit in refits.values() if refit.ring is not None), default=0)


def break_at(bucket: int, patch: pytest.MonkeyPatch, staging: str) -> None:
    kinds: dict[str, Any] = {"device": DeviceDrainer, "host": LockedDrainer, "ring": HostDrainer}
    kind = kinds[staging]
    drain = kind.drain

    def broken(drainer: Any, first: int, end: int) -> Any:
        if first >= bucket:
            raise OSError("scripted: the copy fails")
        return drain(drainer, first, end)

    patch.setattr(kind, "drain", broken)
