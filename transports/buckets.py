"""Where tensors lie in a buffer, whole or cut into buckets. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pitstop.engine.worker_ports import ITEMSIZE, Placed, TensorSpec

ALIGNMENT: Final = 512
"""Every tensor starts at a multiple of this many bytes: what any copy engine and any dtype's view asks for."""


@dataclass(frozen=True, slots=True)
class Part:
    """`count` elements of row `row`, from its flat element `start` on, at byte `offset` of a bucket."""

    row: int
    start: int
    count: int
    offset: int


def place(specs: Iterable[TensorSpec]) -> tuple[tuple[Placed, ...], int]:
    """Lay tensors out in order; return their places and the size of the buffer in bytes."""
    placed, offset = [], 0
    for spec in specs:
        placed.append(Placed(spec, offset))
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed), offset


def cut(specs: Iterable[TensorSpec], slot_nbytes: int) -> list[tuple[Part, ...]]:
    """Cut tensors, in order, into buckets of at most `slot_nbytes`; one that does not fit goes on in the next.

    Every tensor has at least one part, an empty one too. `slot_nbytes` is a positive multiple of `ALIGNMENT`.
    """
    if slot_nbytes <= 0 or slot_nbytes % ALIGNMENT:
        raise ValueError(f"a slot of {slot_nbytes} bytes is not a multiple of {ALIGNMENT}")
    buckets: list[tuple[Part, ...]] = []
    bucket: list[Part] = []
    offset = 0
    for row, spec in enumerate(specs):
        width = ITEMSIZE[spec.dtype]
        start, total = 0, spec.nbytes // width
        while True:
            count = min(total - start, (slot_nbytes - offset) // width)
            if count or not total:
                bucket.append(Part(row, start, count, offset))
                offset += -(-count * width // ALIGNMENT) * ALIGNMENT
                start += count
            if start == total:
                break
            buckets.append(tuple(bucket))
            bucket, offset = [], 0
    if bucket:
        buckets.append(tuple(bucket))
    return buckets
