"""The ring against those who use it badly: superseded plans, floods, trainers and receivers that say what is not so."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.errors import DeadlineExceeded, OfferRejected, ProtocolViolation
from pitstop.engine.worker_ports import Mode
from pitstop.transports import Buffers, buckets, memory, pool, shared_memory
from pitstop.transports.codec import encode, words
from pitstop.transports.memory import HEADROOM
from pitstop.transports.memory_link import memory_sending
from pitstop.transports.messages import Accept, Filled, Lend, Propose, Row, Sent, Welcome
from pitstop.transports.pace import Pace
from tests.transports.children import Worker, child, work
from tests.transports.rig import rig
from tests.transports.test_link import HELLO, raw
from tests.transports.weights import inventory, weights

RING = Buffers(most_nbytes=0, slots=2, slot_nbytes=4096)


async def test_a_plan_that_is_cancelled_while_it_counts_buckets_leaves_no_segment_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting, go = threading.Event(), threading.Event()
    cut: Any = buckets.cut

    def slow(*args: Any) -> Any:
        cutting.set()
        go.wait(10)
        return cut(*args)

    async with rig(tmp_path, buffers=RING) as engine:
        monkeypatch.setattr(shared_memory, "cut", slow)
        first = memory_sending(weights(1).items(), weight_version=1)
        plan = asyncio.create_task(engine.plan(first, [Worker()]))
        await asyncio.to_thread(cutting.wait, 10)
        plan.cancel()
        go.set()
        await asyncio.wait({plan})
        await engine.transport.release(first.offer.refit_id)
        monkeypatch.undo()
        assert all(lease.over for lease in engine.transport._pool._leases)
        worker = Worker()
        again = memory_sending(weights(2).items(), weight_version=2)
        assert (await engine.refit(again, [worker])).error is None
        assert len(engine.transport._pool._leases) == 1


@pytest.mark.parametrize("workers", [1, 2])
async def test_what_receivers_keep_from_one_staged_ring_is_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Memory that a receiver keeps for the next refit is not free: counted as gone, every second one was refused."""
    nbytes = sum(spec.nbytes for spec in inventory(weights(0)).tensors)
    free = [HEADROOM + workers * nbytes + nbytes // 2 + 2 * 4096]
    monkeypatch.setattr(memory, "available", lambda: (free[0], "this test"))
    monkeypatch.setattr(pool, "available", lambda: (1 << 40, "this test"))
    async with rig(tmp_path, buffers=RING, mode="staged") as engine:
        receivers = [Worker() for _ in range(workers)]
        for version in (1, 2, 3):
            sending = memory_sending(weights(version).items(), weight_version=version)
            report = await engine.refit(sending, receivers)
            assert report.error is None
            free[0] = HEADROOM + nbytes // 2
        engine.mode = "in_place"  # which leaves nothing for the next one
        sending = memory_sending(weights(4).items(), weight_version=4)
        assert (await engine.refit(sending, receivers)).error is None
        engine.mode = "staged"
        sending = memory_sending(weights(5).items(), weight_version=5)
        with pytest.raises(OfferRejected):
            await engine.plan(sending, receivers)


def said_too_soon(accept: Accept, rows: int) -> list[bytes]:
    return [encode(Sent(accept.refit_id, words([0] * rows)))]


def lent_where_there_is_no_gpu(accept: Accept, rows: int) -> list[bytes]:
    return [encode(Lend(accept.refit_id, bytes(64), 1 << 30))]


def too_many(accept: Accept, rows: int) -> list[bytes]:
    return [encode(Filled(accept.refit_id, accept.slots + 1))]


@pytest.mark.parametrize("says", [said_too_soon, lent_where_there_is_no_gpu, too_many])
@pytest.mark.parametrize("mode", ["staged", "in_place"])
async def test_a_trainer_that_says_what_is_not_so_fails_its_own_refit_at_once(
    tmp_path: Path, mode: Mode, says: Callable[[Accept, int], list[bytes]]
) -> None:
    specs = inventory(weights(0)).tensors
    rows = tuple(Row(spec.name, spec.dtype, spec.shape) for spec in specs)  # type: ignore[arg-type]
    async with rig(tmp_path, buffers=RING, mode=mode) as engine:
        worker = Worker()
        with raw(engine) as client:
            client.send(encode(HELLO))
            assert isinstance(await asyncio.to_thread(client.hear), Welcome)
            client.send(encode(Propose("r", 1, rows)))
            began = time.monotonic()
            refit = asyncio.create_task(engine.refit(await engine.offer(), [worker]))
            accept = await asyncio.to_thread(client.hear)
            assert isinstance(accept, Accept)
            for frame in says(accept, len(rows)):
                client.send(frame)
            error = (await refit).error
            assert isinstance(error, ProtocolViolation)
            assert time.monotonic() - began < 4
        assert not any(p.kind == "failed" and p.error and "receiver" in p.error.message for p in engine.progress)
        again = memory_sending(weights(2).items(), weight_version=2)
        assert (await engine.refit(again, [worker])).error is None


def test_a_reader_that_says_the_same_again_is_still_overdue() -> None:
    now = 0.0
    pace = Pace(9, 4, clock=lambda: now)
    pace.join("stuck")
    pace.fill(2)
    assert not pace.drain("stuck", 0)
    now = 4.0
    assert not pace.drain("stuck", 0)
    now = 6.0
    assert pace.overdue(5) == ["stuck"]


@pytest.mark.parametrize("mode", ["staged", "in_place"])
async def test_a_reader_that_is_slow_over_every_bucket_fails_alone_as_well(tmp_path: Path, mode: Mode) -> None:
    """No bucket takes it too long, but all of them would take longer than anybody has."""
    async with rig(tmp_path, buffers=RING, mode=mode) as engine:
        engine.limits = (8.0, 2.0)
        with child(work) as well, child(work) as slow:
            await asyncio.to_thread(slow.ask, "dawdle", 1.5)
            sending = memory_sending(weights(1).items(), weight_version=1)
            report = await engine.refit(sending, [well, slow], release=False)
            assert isinstance(report.error, DeadlineExceeded)
            assert report.error.fields["rank"] == 1
            assert "waited for it" in report.error.message
            assert any(p.kind == "landed" and p.rank == 0 for p in engine.progress)
            await engine.release(sending, [well, slow])


def test_whoever_holds_up_the_others_is_known_by_the_time_it_has_cost_them() -> None:
    now = 0.0
    pace = Pace(9, 2, clock=lambda: now)
    pace.join("quick")
    pace.join("slow")
    for bucket in range(1, 7):
        pace.fill(bucket)
        pace.drain("quick", bucket)
        now += 1.0  # which costs nobody anything at first, when a slot is free
        pace.drain("slow", bucket - 1)
    assert pace.holding(4.5) == ["slow"]
    assert not pace.holding(5.5)
    pace.leave("slow")
    now += 100
    assert not pace.holding(0.5)


def test_nobody_is_held_up_where_all_are_slow_or_the_writer_is() -> None:
    now = 0.0
    pace = Pace(9, 2, clock=lambda: now)
    pace.join("one")
    pace.join("other")
    pace.fill(2)
    now += 10
    for reader in ("one", "other"):
        pace.drain(reader, 2)
    now += 10
    pace.fill(3)
    assert not pace.holding(0.0)


FLOOD = """
import sys
import zmq
from pitstop.transports.codec import encode
from pitstop.transports.messages import PROTOCOL, Beat, Hello
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.connect(sys.argv[1])
socket.send(encode(Hello(PROTOCOL, "trainer", 0, 0)))
socket.recv()
print("in", flush=True)
beat = encode(Beat())
while True:
    socket.send(beat)
"""


async def test_clients_that_flood_the_link_do_not_keep_the_engine_from_beating_for_the_others(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        command = (sys.executable, "-c", FLOOD, engine.link.address)
        loud = [await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) for _ in range(3)]
        try:
            for one in loud:
                assert one.stdout is not None
                await asyncio.wait_for(one.stdout.readline(), 30)
            ticks = [time.monotonic()]
            engine.link.ticks.append(lambda: ticks.append(time.monotonic()))
            await asyncio.sleep(3.0)
            ticks.append(time.monotonic())
            assert max(after - before for before, after in pairwise(ticks)) < 1.0
        finally:
            for one in loud:
                one.kill()
                await one.wait()
