"""Readings of live weights beside the engine's steps."""

from __future__ import annotations

import asyncio

from pitstop.engine.errors import ReadingCutShort, from_record
from pitstop.engine.worker_ports import WorkerOp
from tests.vllm.conftest import Garage


async def test_a_reading_that_is_interrupted_says_so_and_one_in_a_thread_equals_one_between_steps(
    garage: Garage,
) -> None:
    live = await garage.start()
    whole = await live.fingerprint()
    op = WorkerOp("fingerprint", "one")
    while (reply := (await live.backend.call_workers(op))[0]).fingerprint is None:
        assert reply.error is None
        await asyncio.sleep(0.01)
    assert [reply.fingerprint] == whole
    await live.backend.call_workers(WorkerOp("fingerprint", "two"))
    await live.ask("interrupt", "")
    reply = (await live.backend.call_workers(WorkerOp("fingerprint", "two")))[0]
    # It may have been over before it was interrupted: this model is tiny.
    assert reply.fingerprint is not None or (
        reply.error is not None and isinstance(from_record(reply.error), ReadingCutShort)
    )
