"""Where a version waits while the replica serves, and at what pace it goes there: through a GPU's ring, without a GPU.

The ring lies in the host's memory (`lent`), and copies are torch's; everything around them is what runs on a GPU.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pitstop.engine.errors import DeadlineExceeded, DigestMismatch, PeerLost, WorkerFailed
from pitstop.engine.refit import route
from pitstop.engine.worker_ports import Ticket
from pitstop.transports import cuda_ring, lent_draining, ring_receiver
from pitstop.transports.buckets import cut, place
from pitstop.transports.lent_draining import DeviceDrainer, LockedDrainer
from pitstop.transports.memory_link import memory_sending
from pitstop.transports.room import Buffers
from pitstop.transports.spare import Spare, spare
from tests.transports import lent
from tests.transports.children import Worker, sha
from tests.transports.rig import Rig, rig, until
from tests.transports.weights import inventory, weights

SPARE = {"device": 2 << 30, "host": 0}
SPECS = inventory(weights(0)).tensors
WHOLE = place(SPECS)[1]
SLOT = 2048


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lent.pretend(monkeypatch)
    yield
    lent.RINGS.clear()
    spare.drop()
    assert spare._claimed == {}, "whoever staged a version has let go of it"


def expected(version: int) -> dict[str, str]:
    return {name: sha(tensor) for name, tensor in weights(version).items()}


@asynccontextmanager
async def engine(tmp_path: Path, staging: str, rate: int | None = None, slots: int = 2) -> AsyncIterator[Rig]:
    buffers = Buffers(device_slots=slots, device_slot_nbytes=SLOT, stage_nbytes_per_s=rate)
    async with rig(tmp_path, buffers=buffers) as made:
        made.spare = SPARE[staging]
        yield made


async def staged(engine: Rig, version: int, worker: Worker) -> Any:
    """Stage a version, and leave it there."""
    sending = memory_sending(weights(version).items(), weight_version=version)
    report = await engine.refit(sending, [worker], release=False)
    return sending, report


@pytest.mark.parametrize("rate", [None, 1 << 20])
@pytest.mark.parametrize("staging", SPARE)
async def test_a_version_is_staged_bit_for_bit_over_and_over_in_memory_of_its_own(
    tmp_path: Path, staging: str, rate: int | None
) -> None:
    assert len(cut(SPECS, SLOT)) > 10
    async with engine(tmp_path, staging, rate) as made:
        worker, places = Worker(), set()
        for version in (1, 2, 1):
            sending, report = await staged(made, version, worker)
            assert report.error is None
            assert sending.transport == "cuda_ipc"
            assert len(spare._claimed) == 1
            # B33: what has landed stays what it is, whatever becomes of the ring.
            for ring in lent.RINGS.values():
                ring.bytes().fill_(255)
            assert await asyncio.to_thread(worker.content) == expected(version)
            assert worker.sink.bucket is not None
            places.add(min(tensor.data_ptr() for _, tensor in worker.sink.bucket.tensors if tensor.numel()))
            await made.release(sending, [worker])
            assert spare._claimed == {}
            assert (spare._memory is not None) is (staging == "host")
    if staging == "host":
        assert len(places) == 1, "host memory is kept, and used again"


async def test_two_ranks_of_a_gpu_stage_at_once_each_for_itself(tmp_path: Path) -> None:
    async with engine(tmp_path, "device", 1 << 20) as made:
        workers = [Worker(), Worker()]
        sending = memory_sending(weights(1).items(), weight_version=1)
        assert (await made.refit(sending, workers, release=False)).error is None
        assert len(spare._claimed) == 2
        for worker in workers:
            assert await asyncio.to_thread(worker.content) == expected(1)
        await made.release(sending, workers)


@pytest.mark.parametrize("staging", SPARE)
async def test_b33_a_rank_that_sleeps_before_each_bucket_of_a_lent_ring_never_sees_another_buckets_bytes(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = {"device": DeviceDrainer, "host": LockedDrainer}[staging]
    drain = kind.drain

    def slowly(drainer: Any, first: int, end: int) -> Any:
        if drainer._ticket.rank == 2:
            for _ in range(3):
                time.sleep(0.01)
                yield first
        yield from drain(drainer, first, end)

    monkeypatch.setattr(kind, "drain", slowly)
    async with engine(tmp_path, staging, 1 << 30) as made:
        workers = [Worker(), Worker(), Worker()]
        for version in (1, 2):
            sending = memory_sending(weights(version).items(), weight_version=version)
            assert (await made.refit(sending, workers, release=False)).error is None
            for worker in workers:
                assert await asyncio.to_thread(worker.content) == expected(version)
            await made.release(sending, workers)


async def test_tickets_say_where_how_fast_and_why(tmp_path: Path) -> None:
    for staging, pace, why in (("device", 1000, "2.00 GiB are free"), ("host", 1000, "waits in host memory")):
        async with engine(tmp_path / staging, staging, 1000) as made:
            ticket = (await made.plan(memory_sending(weights(1).items(), weight_version=1), [Worker()]))[0]
            assert (ticket.staging, ticket.pace, ticket.in_place) == (staging, pace, False)
            assert why in ticket.why


@pytest.mark.parametrize("staging", SPARE)
async def test_a_byte_that_changes_in_the_ring_is_caught_before_anything_lands(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = cuda_ring.Pourer.pour

    def pour(pourer: cuda_ring.Pourer, bucket: int) -> Any:
        fence = damaged(pourer, bucket)
        if bucket == 5:
            next(iter(lent.RINGS.values())).bytes()[5 % 2 * SLOT + 100] ^= 4
        return fence

    async with engine(tmp_path, staging, 1 << 20) as made:
        worker = Worker()
        with monkeypatch.context() as patch:
            patch.setattr(cuda_ring.Pourer, "pour", pour)
            sending, report = await staged(made, 1, worker)
        assert isinstance(report.error, DigestMismatch)
        assert report.error.fields["tensor"] == "embed.weight"
        assert worker.sink.bucket is None
        await made.release(sending, [worker])
        sending, report = await staged(made, 2, worker)
        assert report.error is None
        assert await asyncio.to_thread(worker.content) == expected(2)
        await made.release(sending, [worker])


async def test_a_byte_that_changes_in_host_memory_on_its_way_there_is_caught_before_anything_lands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = cuda_ring.Side.settle

    def damage(side: cuda_ring.Side, seconds: float, owner: object) -> None:
        settle(side, seconds, owner)
        if isinstance(owner, LockedDrainer) and owner._memory is not None:
            owner._memory[-600] ^= 1  # of the last bucket, among others

    async with engine(tmp_path, "host") as made:
        worker = Worker()
        with monkeypatch.context() as patch:
            patch.setattr(cuda_ring.Side, "settle", damage)
            sending, report = await staged(made, 1, worker)
        assert isinstance(report.error, DigestMismatch)
        assert worker.sink.bucket is None
        await made.release(sending, [worker])


@pytest.mark.parametrize("staging", SPARE)
async def test_who_waits_for_its_turn_still_beats_hears_and_lets_go(tmp_path: Path, staging: str) -> None:
    async with engine(tmp_path, staging, 1) as made:
        made.limits = (600.0, 2.0)
        worker, sending = Worker(), memory_sending(weights(1).items(), weight_version=1)
        tickets = await made.plan(sending, [worker])
        refit_id = sending.offer.refit_id
        worker.receive(tickets[0])
        watch = asyncio.create_task(made.ended(refit_id, 1))
        await until(lambda: made.here(refit_id) == 1)
        ring = made.transport.ring(refit_id)
        assert ring is not None
        sent = asyncio.create_task(sending.send(route(sending.offer, made.model), tickets, ring))
        await until(lambda: ring.drained > 0)
        await asyncio.sleep(4.5)
        assert not watch.done(), "it is slow, and not silent"
        assert ring.drained < len(cut(SPECS, SLOT)) // 2
        await made.transport.abort(refit_id, PeerLost("given up", peer="test"))
        (ended,) = [p for p in await watch if p.kind != "attached"]
        assert ended.error is not None
        # By the time that it says so it holds nothing, and the next version has room.
        assert spare._claimed == {}
        sent.cancel()
        await asyncio.wait({sent})
        await made.release(sending, [worker])


async def test_a_pace_that_would_come_too_late_yields_to_the_deadline(tmp_path: Path) -> None:
    async with engine(tmp_path, "host", 1) as made:
        made.limits = (9.0, 2.0)
        worker = Worker()
        sending, report = await staged(made, 1, worker)
        assert report.error is None
        assert await asyncio.to_thread(worker.content) == expected(1)
        await made.release(sending, [worker])


async def test_pieces_of_a_bucket_wait_for_their_turn_and_slots_are_free_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched, and when, is the same on a GPU: no more than a piece at once, and nothing before its time."""
    for staging in SPARE:
        asked: list[int] = []
        paced = lent_draining._paced
        monkeypatch.setattr(lent_draining, "PIECE_NBYTES", 512)

        def count(throttle: Any, nbytes: int, asked: list[int] = asked, paced: Any = paced) -> Any:
            asked.append(nbytes)
            return paced(throttle, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(lent_draining, "_paced", count)
            async with engine(tmp_path / staging, staging, 1 << 30) as made:
                sending, report = await staged(made, 1, worker := Worker())
                assert report.error is None
                await made.release(sending, [worker])
        if staging == "host":
            assert max(asked) <= 512
            assert sum(asked) == WHOLE
        else:
            assert sum(asked) == sum(spec.nbytes for spec in SPECS)


async def test_the_memory_of_a_version_that_is_given_up_is_free_when_its_release_returns(tmp_path: Path) -> None:
    """Whoever plans the next refit measures what is free: it must not miss what the last one is about to let go of."""
    for staging in SPARE:
        async with engine(tmp_path / staging, staging, 1) as made:
            made.limits = (600.0, 5.0)
            worker, sending = Worker(), memory_sending(weights(1).items(), weight_version=1)
            tickets = await made.plan(sending, [worker])
            refit_id = sending.offer.refit_id
            worker.receive(tickets[0])
            ring = made.transport.ring(refit_id)
            watch = asyncio.create_task(made.ended(refit_id, 1))
            await until(lambda: made.here(refit_id) == 1)  # noqa: B023 - called before the loop goes on
            sent = asyncio.create_task(sending.send(route(sending.offer, made.model), tickets, ring))
            await until(lambda: bool(spare._claimed))
            sent.cancel()
            await made.transport.abort(refit_id, PeerLost("superseded", peer="test"))
            await made.transport.release(refit_id)
            assert spare._claimed == {}
            await asyncio.wait({sent, watch})
            await asyncio.to_thread(worker.release)


async def test_what_a_receiver_keeps_when_it_fails_is_counted_as_room_for_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a version that just fits would be refused for ever, for the memory that waits for it."""

    def broken(*_: object) -> None:
        raise OSError("scripted")

    async with engine(tmp_path, "host") as made:
        worker, rank = Worker(), lent.layout(0, 1, 1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(ring_receiver, "proven", broken)
            sending, report = await staged(made, 1, worker)
        assert isinstance(report.error, WorkerFailed)
        await made.release(sending, [worker])
        assert made.transport._kept_by(rank) == WHOLE
        assert [p.nbytes for p in made.progress if p.kind == "failed"] == [0]
        made.spare = SPARE["device"]  # who stages on the GPU has no use for it, and keeps nothing
        sending, report = await staged(made, 2, worker)
        assert report.error is None
        await made.release(sending, [worker])
        assert made.transport._kept_by(rank) == 0
        assert spare._memory is None


def test_memory_that_a_gpu_may_still_write_to_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        passed = False

        def query(self) -> bool:
            return self.passed

    late = Late()
    monkeypatch.setattr(cuda_ring.Side, "fence", lambda _: late)
    monkeypatch.setattr(lent_draining, "_COPIED_S", 0.01)
    ring = lent.LentRing(lent.CPU, 2 * SLOT)
    first = replace(
        ticket("one"), tensors=place(SPECS)[0], slots=2, slot_nbytes=SLOT, staging="host", device=lent.GPU
    )  # fmt: skip
    draining = LockedDrainer(first, ring)
    memory = draining._memory
    with pytest.raises(DeadlineExceeded):
        list(draining.drain(0, 1))
    assert draining.close() == 0
    assert spare._memory is None
    assert cuda_ring._stuck == [(late, draining)]
    assert draining._memory is memory
    late.passed = True
    other = LockedDrainer(replace(first, refit_id="two"), ring)
    list(other.drain(0, 1))
    assert cuda_ring._stuck == []
    assert other.close() == WHOLE


def ticket(refit_id: str, rank: int = 0) -> Ticket:
    return Ticket(refit_id, "r0", 1, rank, "", "", 0, (), "", "", 1.0, 0.05)


def test_a_rank_never_stages_two_versions_and_says_whose_is_in_the_way() -> None:
    room = Spare()
    room.claim(ticket("one"))
    room.claim(ticket("one", rank=1))
    with pytest.raises(DeadlineExceeded, match="still holds the version of refit one") as caught:
        room.claim(ticket("two"))
    assert (caught.value.fields["rank"], caught.value.fields["phase"]) == (0, "stage")
    room.free(ticket("two"))  # who has none has none to give up
    with pytest.raises(DeadlineExceeded):
        room.claim(ticket("two"))
    room.free(ticket("one"))
    room.claim(ticket("two"))


async def test_who_waits_for_room_gets_it_as_soon_as_it_is_there() -> None:
    room, patient = Spare(), Ticket("two", "r0", 1, 0, "", "", 0, (), "", "", 1.0, 60.0)
    room.claim(ticket("one"))
    waiting = asyncio.create_task(asyncio.to_thread(room.claim, patient))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    room.free(ticket("one"), torch.zeros(8))
    await asyncio.wait_for(waiting, 10)


def test_a_buffer_is_its_buckets_one_behind_the_other() -> None:
    """What the copy of a whole bucket at once rests on."""
    for slot in (512, 1024, 2048, 65536):
        offsets = [placed.offset for placed in place(SPECS)[0]]
        for number, parts in enumerate(cut(SPECS, slot)):
            for part in parts:
                width = SPECS[part.row].nbytes // max(1, torch.Size(SPECS[part.row].shape).numel() or 1)
                assert number * slot + part.offset == offsets[part.row] + part.start * width


async def test_a_receiver_that_is_told_to_stop_while_memory_is_made_ready_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    go_on, take = threading.Event(), Spare.take

    def slowly(room: Spare, *arguments: Any) -> Any:
        go_on.wait(30)
        return take(room, *arguments)

    monkeypatch.setattr(Spare, "take", slowly)
    async with engine(tmp_path, "host") as made:
        made.limits = (4.0, 2.0)
        worker = Worker()
        sending = memory_sending(weights(1).items(), weight_version=1)
        refit = asyncio.create_task(made.refit(sending, [worker]))
        await until(lambda: bool(spare._claimed))
        await made.transport.abort(sending.offer.refit_id, PeerLost("given up", peer="test"))
        assert (await refit).error is not None
        go_on.set()
        await until(lambda: not spare._claimed)
        gc.collect()
