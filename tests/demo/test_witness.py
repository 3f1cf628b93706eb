from __future__ import annotations

from collections.abc import AsyncIterator

from pitstop.engine import Chunk
from pitstop.engine.demo.witness import follow


async def stream(*chunks: Chunk) -> AsyncIterator[Chunk]:
    for chunk in chunks:
        yield chunk


async def test_a_witness_keeps_apart_what_different_weights_made() -> None:
    seen = await follow(
        stream(
            Chunk([1], [], "once", 0, 3),
            Chunk([2], [], " more", 1, 3),
            Chunk([3], [], " into", 2, 4),
            Chunk([], [], "", 3, 5, "length"),
        )
    )
    assert seen.pieces == [(3, "once more"), (4, " into")]
    assert seen.crossed
    assert seen.tokens == 3
    assert seen.pause > 0


async def test_a_stream_under_one_version_has_crossed_nothing() -> None:
    assert not (await follow(stream(Chunk([1], [], "a", 0, 3), Chunk([2], [], "b", 1, 3)))).crossed
    assert not (await follow(stream())).crossed
