"""The digest's definition (see `digest`), fused with a copy or a cast, as a Triton kernel. Imported on demand.

A program runs over the blocks of one chunk and keeps a sum for each column: there a word is only ever multiplied
by its block's key, which all words of the block share. The columns' own keys are multiplied in at the end, once a
program. So a word costs one multiplication, and the rest is the copy's time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pitstop.transports.digest import BLOCK
from pitstop.transports.digest_table import ALIGNED, NARROW, WIDE

WARPS = 2
BLOCKS = 4  #: blocks on their way at once, in each program

_BLOCK = tl.constexpr(BLOCK)
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)


def _odd(n: tl.tensor) -> tl.tensor:
    z = n.to(tl.uint64) * _STEP
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    return (z ^ (z >> 31)) | 1


def _taken(source: tl.tensor, place: tl.tensor, mask: tl.tensor, narrow: tl.constexpr) -> tl.tensor:
    found = tl.load(source + place, mask=mask, other=0)
    if narrow:
        top = found >> 16
        rounded = (found + 0x7FFF + (top & 1)) >> 16
        # Rounding could carry a NaN's bits into infinity or over the sign: it is made quiet instead.
        found = tl.where((found & 0x7FFFFFFF) > 0x7F800000, top | 0x40, rounded).to(tl.uint16)
    return found


def _edge(
    source: tl.tensor, target: tl.tensor, copies: tl.tensor, block: tl.tensor, begin: tl.tensor, end: tl.tensor,
    narrow: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    lane = tl.arange(0, _BLOCK)
    mask = (lane >= begin) & (lane < end)
    words = taken(source, lane, mask, narrow)
    if copies:
        tl.store(target + lane, words, mask=mask)
    return words.to(tl.uint64) * odd(block + 1025)


def _digest(
    table: tl.tensor, owners: tl.tensor, low: tl.tensor, lanes: tl.tensor, digests: tl.tensor, chunk: tl.constexpr,
    width: tl.constexpr, aligned: tl.constexpr, narrow: tl.constexpr, blocks: tl.constexpr,
) -> None:  # fmt: skip
    number = low + tl.program_id(0)
    entry = table + tl.load(owners + number).to(tl.int64) * 8
    ahead = (number - tl.load(entry + 6)).to(tl.int64) * chunk
    block = tl.load(entry + 2) + ahead
    begin = tl.where(ahead == 0, tl.load(entry + 3), 0).to(tl.int32)
    end = tl.minimum(tl.load(entry + 4) - ahead * _BLOCK, chunk * _BLOCK).to(tl.int32)
    copies = tl.load(entry + 1) != 0
    if width == 2:
        source = tl.load(entry).to(tl.pointer_type(tl.uint32 if narrow else tl.uint16)) + ahead * _BLOCK
        target = tl.load(entry + 1).to(tl.pointer_type(tl.uint16)) + ahead * _BLOCK
    else:
        source = tl.load(entry).to(tl.pointer_type(tl.uint8)) + ahead * _BLOCK
        target = tl.load(entry + 1).to(tl.pointer_type(tl.uint8)) + ahead * _BLOCK
    if aligned:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    lane = tl.arange(0, _BLOCK)
    row = tl.arange(0, blocks)[:, None]
    sums = tl.zeros([_BLOCK], tl.uint64)
    # A first or a last block that is not whole goes by itself: a mask within a block costs the wide loads.
    first = tl.where((begin > 0) | (end < _BLOCK), 1, 0)
    last = end // _BLOCK
    for at in range(first, last, blocks):
        place = (at + row) * _BLOCK + lane[None, :]
        mask = (at + row) < last
        words = taken(source, place, mask, narrow)
        if copies:
            tl.store(target + place, words, mask=mask)
        sums += tl.sum(words.to(tl.uint64) * odd(block + 1025 + at + row), axis=0)
    if first > 0:
        sums += edge(source, target, copies, block, begin, tl.minimum(end, _BLOCK), narrow)
    if (last > 0) & (last * _BLOCK < end):
        skip = last * _BLOCK
        sums += edge(source + skip, target + skip, copies, block + last, 0, end - skip, narrow)
    keys = tl.load(lanes + lane).to(tl.uint64, bitcast=True)
    total = tl.sum(sums * keys, axis=0) + (end - begin).to(tl.uint64) * _STEP
    tl.atomic_add(digests + tl.load(entry + 5), total.to(tl.int64, bitcast=True), sem="relaxed")


odd: Any = triton.jit(_odd)
taken: Any = triton.jit(_taken)
edge: Any = triton.jit(_edge)
kernel: Any = triton.jit(_digest, do_not_specialize=["low"])


def launch(table: Any, owners: Any, low: int, high: int, lanes: Any, digests: Any, kind: int, chunk: int) -> None:
    """Queue the chunks `low` to `high` of a table, all of one kind, on torch's current stream."""
    kernel[(high - low,)](
        table, owners, low, lanes, digests, chunk=chunk, width=2 if kind & WIDE else 1, aligned=bool(kind & ALIGNED),
        narrow=bool(kind & NARROW), blocks=BLOCKS, num_warps=WARPS,
    )  # fmt: skip
