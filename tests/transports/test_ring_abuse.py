"""The ring against those who use it badly: superseded plans, floods, trainers and receivers that say what is not so."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.errors import ProtocolViolation
from pitstop.engine.refit import route
from pitstop.transports import Buffers, shared_memory
from pitstop.transports.codec import encode, words
from pitstop.transports.memory_link import memory_sending
from pitstop.transports.messages import Accept, Beat, Filled, Lend, Sent, Welcome
from pitstop.transports.pace import Pace
from pitstop.transports.sources import TensorSource
from tests.transports.children import Worker
from tests.transports.rig import rig, until
from tests.transports.test_link import HELLO, Raw, raw
from tests.transports.weights import weights

RING = Buffers(most_nbytes=0, slots=2, slot_nbytes=4096)


async def test_a_plan_that_is_cancelled_while_it_counts_buckets_leaves_no_segment_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting, go = threading.Event(), threading.Event()
    cut: Any = shared_memory.cut

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
