"""What is over leaves nothing behind: no client, no descriptor, no lease, no mapping, no thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from pitstop.engine.errors import PeerLost
from pitstop.engine.refit import Outcome
from pitstop.engine.worker_ports import Manifest, Routed
from pitstop.transports import Publisher, PublishHandle, control
from pitstop.transports.memory_link import memory_sending
from pitstop.transports.pool import SegmentPool
from pitstop.transports.segment import Kept, Segment
from tests.transports.children import Worker, descriptors
from tests.transports.rig import Rig, rig, until
from tests.transports.weights import weights


async def refits(engine: Rig, count: int, worker: Worker) -> None:
    for version in range(count):
        report = await engine.refit(memory_sending(weights(version), weight_version=version), [worker])
        assert report.error is None


async def test_a_receiver_that_has_let_go_is_forgotten_with_its_descriptor(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        await refits(engine, 1, Worker())
        await until(lambda: not engine.link._clients, 2.0)
        before = descriptors()
        await refits(engine, 5, Worker())
        await until(lambda: not engine.link._clients, 2.0)
        assert descriptors() == before
        assert engine.link.violations == 0


async def test_a_receiver_that_fails_and_holds_nothing_is_forgotten(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        engine.limits = (0.5, 5.0)
        worker = Worker()
        sending = memory_sending(weights(1), weight_version=1)
        (ticket,) = await engine.plan(sending, [worker])
        worker.receive(ticket)
        (over,) = await engine.ended(sending.offer.refit_id, 1)
        assert over.kind == "failed"
        await until(lambda: not engine.link._clients, 2.0)
        await engine.release(sending, [worker])
        assert engine.link.violations == 0


async def test_trainers_that_fill_the_link_keep_no_receiver_out(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await Publisher.connect_async(engine.link.address)
        most, control._MOST_CLIENTS = control._MOST_CLIENTS, 1  # type: ignore[misc]
        try:
            await refits(engine, 1, Worker())
        finally:
            control._MOST_CLIENTS = most  # type: ignore[misc]
        await asyncio.to_thread(trainer.close)


@pytest.mark.parametrize("late", ["while it is taken", "for good"])
async def test_a_plan_that_is_given_up_gives_its_segment_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    taking, go_on, made = threading.Event(), threading.Event(), threading.Event()
    async with rig(tmp_path) as engine:
        worker, pool = Worker(), engine.transport._pool
        await engine.refit(memory_sending(weights(1), weight_version=1), [worker])
        fresh = Segment.__init__

        def slow(self: Segment, nbytes: int, name: str = "pitstop") -> None:
            taking.set()
            go_on.wait(10)
            fresh(self, nbytes, name)
            made.set()

        monkeypatch.setattr(Segment, "__init__", slow)
        # The old segment is too small for it, so that a fresh one is made: slowly.
        large = memory_sending({"a": torch.zeros(1 << 20)}, weight_version=2)
        manifest = Manifest((Routed(0, large.offer.tensors[0]),))
        planning = asyncio.ensure_future(engine.transport.plan(large.offer, manifest, [], engine.limits))
        assert await asyncio.to_thread(taking.wait, 10)
        planning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await planning
        if late == "for good":
            engine.transport.close()
        go_on.set()
        assert await asyncio.to_thread(made.wait, 10)
        await asyncio.sleep(0.1)
        if late == "for good":
            await until(lambda: not pool._leases and not [d for d in descriptors() if "/memfd:pitstop " in d], 5.0)
        else:
            await until(lambda: bool(pool._leases) and all(lease.free for lease in pool._leases), 5.0)
        monkeypatch.undo()
        if late != "for good":
            await engine.refit(memory_sending(weights(3), weight_version=3), [worker])
            assert len(pool._leases) == 1


def test_a_pool_is_safe_from_two_threads() -> None:
    pool, errors = SegmentPool(), list[Exception]()

    def refit(name: str) -> None:
        try:
            for n in range(200):
                lease = pool.take(f"{name}{n}", 4096)
                assert pool.holds(lease)
                lease.over = True
        except Exception as error:  # noqa: BLE001 - the test asserts that there is none
            errors.append(error)

    threads = [threading.Thread(target=refit, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert len({lease.segment for lease in pool._leases}) <= 4
    pool.close()


async def test_no_mapping_of_a_closed_engine_stays(tmp_path: Path) -> None:
    gc.collect()
    before = len(mappings())
    for n in range(3):
        async with rig(tmp_path / str(n)) as engine:
            await engine.refit(memory_sending(weights(n), weight_version=n), [Worker()])
            trainer = await Publisher.connect_async(engine.link.address)
            handle = trainer.publish(weights(n), weight_version=n + 1)
            await engine.refit(await engine.offer(), [Worker()])
            await asyncio.to_thread(handle.result, 10)
            assert len(mappings()) > before
            await asyncio.to_thread(trainer.close)
        gc.collect()
        await until(lambda: len(mappings()) == before, 5.0)


def test_a_mapping_of_an_engine_that_died_goes_when_the_next_one_is_made() -> None:
    kept, dead, live = Kept("read"), Segment(4096), Segment(4096)
    assert kept.take("dead", dead.path, 4096) is kept.take("dead", dead.path, 4096)
    dead.close()
    mapping = kept.take("live", live.path, 4096)
    assert list(kept._mappings.values()) == [mapping]
    kept.drop("live")
    live.close()


async def test_a_publisher_that_nobody_closes_is_collected_with_all_it_has(tmp_path: Path) -> None:
    def train(address: str, version: int) -> PublishHandle:
        return Publisher.connect(address).publish(weights(version), weight_version=version)

    async with rig(tmp_path) as engine:
        await refits(engine, 1, Worker())
        before = descriptors()
        for version in (1, 2):
            # The handle keeps its publisher until the refit has ended.
            handle = await asyncio.to_thread(train, engine.link.address, version)
            gc.collect()
            await asyncio.sleep(0.6)
            await engine.refit(await engine.offer(), [Worker()])
            assert (await asyncio.to_thread(handle.result, 10)).outcome is Outcome.COMMITTED
            gc.collect()
            await until(lambda: not publishing(), 5.0)
            await until(lambda: not engine.link._clients, 2.0)
            assert descriptors() == before


async def test_a_publisher_that_was_refused_is_collected_too(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await Publisher.connect_async(engine.link.address)
    with pytest.raises(PeerLost):
        await asyncio.to_thread(trainer.publish(weights(1), weight_version=1).result, 5)
    with pytest.raises(PeerLost):
        trainer.publish(weights(1), weight_version=1)
    gone = weakref.ref(trainer)
    del trainer
    await until(lambda: not publishing(), 5.0)
    gc.collect()
    assert gone() is None


def publishing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pitstop-publisher"]


def mappings() -> list[str]:
    """The probe of a link is in no map: only segments that carry weights are."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:pitstop " in line]
