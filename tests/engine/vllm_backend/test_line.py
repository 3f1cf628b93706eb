"""Calls into an engine: not reached by cancellation, ended by the engine's end."""

from __future__ import annotations

import asyncio

import pytest

from pitstop.engine.errors import ReplicaDied
from pitstop.engine.vllm_backend.line import Line


async def given(event: asyncio.Event, result: int) -> int:
    await event.wait()
    return result


async def test_a_result_or_an_error_is_the_callers() -> None:
    line, now = Line(), asyncio.Event()
    now.set()
    assert await line.call(given(now, 3)) == 3

    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await line.call(fail())


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_result_is_never_lost_to_a_cancellation(turns: int) -> None:
    line, now = Line(), asyncio.Event()
    late: list[int] = []
    calling = asyncio.create_task(line.call(given(now, 7), late.append))
    for turn in range(8):
        if turn == turns:
            calling.cancel()
        if turn == 2:
            now.set()
        await asyncio.sleep(0)
    taken = await asyncio.gather(calling, return_exceptions=True)
    await asyncio.sleep(0)
    assert [7 in taken, late == [7]].count(True) == 1


async def test_a_cut_ends_pending_and_later_calls_each_with_an_error_of_its_own() -> None:
    line, never = Line(), asyncio.Event()
    calls = [asyncio.create_task(line.call(given(never, n))) for n in range(3)]
    await asyncio.sleep(0)
    line.cut(ReplicaDied("gone", replica="r"))
    line.cut(ReplicaDied("again", replica="r"))
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in errors] == ["gone"] * 3
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(ReplicaDied, match="gone"):
        await line.call(given(never, 1))
    assert len(asyncio.all_tasks()) == 1
