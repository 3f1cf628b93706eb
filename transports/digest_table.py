"""Parts of tensors cut into chunks of about equal size, one for each program of a GPU's kernel. Pure arithmetic.

A chunk begins at a multiple of the digest's block, so that a program knows its words' keys by their columns. The
first chunk of a part may therefore begin before the part does; what lies there is never looked at.
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

SOURCE, TARGET, FIRST, BEGIN, END, ROW = range(6)
"""Columns of an entry: two addresses, the number of the first block, the words from which on and before which the
part lies (counted from the chunk's start), and the row of the digest."""

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
    """Chunks of all buckets. `launches[n]` are the runs of chunks of one kind of bucket n: (first, behind, kind)."""

    entries: NDArray[np.int64]
    launches: dict[int, list[tuple[int, int, int]]]


def table(parts: Parts, copies: NDArray[np.bool_], shift: NDArray[np.int64], chunk: int = CHUNK) -> Table:
    """Cut parts into chunks of at most `chunk` blocks.

    `copies`: whether a part has a target. `shift`: what will be added to the one or the other address of it later,
    as far as it is known; only its alignment counts.
    """
    width = np.minimum(parts.itemsize, 2)
    times = parts.itemsize // width
    words, first = parts.count * times, parts.start * times
    lane, most = first % BLOCK, chunk * BLOCK
    chunks = np.where(words > 0, -(-(lane + words) // most), 0)
    part = np.repeat(np.arange(chunks.size), chunks)
    at = (np.arange(part.size) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * most
    read = np.where(parts.narrow, 4, width)
    back = at - lane[part]
    entries = np.empty((part.size, 6), np.int64)
    entries[:, SOURCE] = parts.source[part] + back * read[part]
    entries[:, TARGET] = np.where(copies[part], parts.target[part] + back * width[part], 0)
    entries[:, FIRST] = (first // BLOCK)[part] + at // BLOCK
    entries[:, BEGIN] = np.where(at == 0, lane[part], 0)
    entries[:, END] = np.minimum((lane + words)[part] - at, most)
    entries[:, ROW] = parts.row[part]
    addresses = (parts.source - lane * read) | np.where(copies, parts.target - lane * width, 0) | shift
    kinds = (width == 2) * WIDE + (addresses % 16 == 0) * ALIGNED + parts.narrow * NARROW
    group = parts.bucket[part] * _KINDS + kinds[part]
    if np.any(np.diff(group) < 0):
        order = np.argsort(group, kind="stable")
        entries, group = entries[order], group[order]
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), int(group.size)]
    launches: dict[int, list[tuple[int, int, int]]] = {}
    for low, high in pairwise(cuts):
        if low < high:
            bucket, kind = divmod(int(group[low]), _KINDS)
            launches.setdefault(bucket, []).append((low, high, kind))
    return Table(entries, launches)
