"""Parts of tensors cut into chunks of about equal size, one for each program of a GPU's kernel. Pure arithmetic.

A chunk begins at a multiple of the digest's block, so that a program knows its words' keys by their columns. The
first chunk of a part may therefore begin before the part does; what lies there is never looked at. A chunk takes four
bytes, the number of its part: the table of a large model is made and sent to the GPU in a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec
from pitstop.transports.digest import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pitstop.transports.buckets import Part

CHUNK: Final = 16
"""Blocks of one chunk, at most: 32 KiB of bfloat16. A bucket of 64 MiB is then 2048 programs."""

SOURCE, TARGET, FIRST, BEGIN, END, ROW, CHUNK0 = range(7)
"""Columns of an entry. Counted from the start of the block in which the part begins: the addresses of that start, the
block's number, and the words from which on and before which the part lies; the digest's row; its first chunk."""
COLUMNS: Final = 8

WIDE: Final = 1  #: a kind's bit: words of two bytes, else of one
ALIGNED: Final = 2  #: a kind's bit: both addresses are multiples of 16
NARROW: Final = 4  #: a kind's bit: float32 is rounded to bfloat16 on the way, and the digest is that of the result
_KINDS: Final = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """What to digest, bucket by bucket, a part an entry of each array; `bucket` ascends.

    `count` elements of `itemsize` bytes, the first of which is element `start` of the flat tensor of row `row`; where
    `narrow` is true they are bfloat16, and float32 at the source.
    """

    bucket: NDArray[np.int64]
    row: NDArray[np.int64]
    itemsize: NDArray[np.int64]
    start: NDArray[np.int64]
    count: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    narrow: NDArray[np.bool_]


def parts_of(
    specs: Sequence[TensorSpec], buckets: Sequence[Sequence[Part]], ring: int, slots: int, slot_nbytes: int,
    late: Literal["source", "target"], narrow: Sequence[bool] = (),
) -> Parts:  # fmt: skip
    """Return the parts between a ring at address `ring` and tensors: these are the `late` side, at 0 for now.

    `narrow`, one a row, or none at all: whether it is a source of float32 that travels as bfloat16.
    """
    flat = [(n, p.row, p.start, p.count, p.offset) for n, bucket in enumerate(buckets) for p in bucket]
    number, row, start, count, offset = np.array(flat, np.int64).reshape(-1, 5).T.copy()
    itemsize = np.array([ITEMSIZE[spec.dtype] for spec in specs], np.int64)[row]
    rounds = np.array(narrow, np.bool_)[row] if narrow else np.zeros(row.size, np.bool_)
    place, within = ring + number % slots * slot_nbytes + offset, start * np.where(rounds, 4, itemsize)
    source, target = (within, place) if late == "source" else (place, within)
    return Parts(number, row, itemsize, start, count, source, target, rounds)


@dataclass(frozen=True, slots=True)
class Table:
    """Entries, a part each, and of every chunk the number of its entry.

    `launches[n]` are the chunks of bucket n, of one kind each: (first, behind, kind); `entries_of[n]` are its entries.
    """

    entries: NDArray[np.int64]
    owners: NDArray[np.int32]
    launches: dict[int, list[tuple[int, int, int]]]
    entries_of: dict[int, tuple[int, int]]


def table(parts: Parts, copies: NDArray[np.bool_], shift: NDArray[np.int64], chunk: int = CHUNK) -> Table:
    """Cut parts into chunks of at most `chunk` blocks.

    `copies`: whether a part has a target. `shift`: what will be added to the one or the other address of it later,
    as far as it is known; only its alignment counts.
    """
    width = np.minimum(parts.itemsize, 2)
    times = parts.itemsize // width
    words, first = parts.count * times, parts.start * times
    lane = first % BLOCK
    source = parts.source - lane * np.where(parts.narrow, 4, width)
    target = np.where(copies, parts.target - lane * width, 0)
    kinds = (width == 2) * WIDE + ((source | target | shift) % 16 == 0) * ALIGNED + parts.narrow * NARROW
    group = parts.bucket * _KINDS + kinds
    order = np.argsort(group, kind="stable")
    order = order[words[order] > 0]
    chunks = -(-(lane + words)[order] // (chunk * BLOCK))
    ends = np.cumsum(chunks)
    entries = np.zeros((order.size, COLUMNS), np.int64)
    columns = (source, target, first // BLOCK, lane, lane + words, parts.row)
    for at, column in enumerate(columns):
        entries[:, at] = column[order]
    entries[:, CHUNK0] = ends - chunks
    group = group[order]
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), int(order.size)]
    launches: dict[int, list[tuple[int, int, int]]] = {}
    entries_of: dict[int, tuple[int, int]] = {}
    for low, high in pairwise(cuts):
        if low < high:
            bucket, kind = divmod(int(group[low]), _KINDS)
            launches.setdefault(bucket, []).append((int(entries[low, CHUNK0]), int(ends[high - 1]), kind))
            entries_of[bucket] = (entries_of.get(bucket, (low, high))[0], high)
    owners = np.repeat(np.arange(order.size, dtype=np.int32), chunks)
    return Table(entries, owners, launches, entries_of)
