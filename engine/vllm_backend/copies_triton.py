"""Copies from a table of addresses, as a Triton kernel. Imported on demand."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pitstop.engine.vllm_backend.copies import CHUNK

WARPS = 4
BLOCK = 1024  #: words on their way at once, in each program


def _copy(table: tl.tensor, owners: tl.tensor, chunk: tl.constexpr, block: tl.constexpr) -> None:
    number = tl.program_id(0)
    entry = table + tl.load(owners + number).to(tl.int64) * 4
    ahead = (number - tl.load(entry + 3)) * chunk
    words = tl.minimum(tl.load(entry + 2) - ahead, chunk).to(tl.int32)
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.uint64)) + ahead, 16)
    target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.uint64)) + ahead, 16)
    lane = tl.arange(0, block)
    # The last block goes by itself: a mask within a block costs the wide loads.
    whole = words // block * block
    for at in range(0, whole, block):
        tl.store(target + at + lane, tl.load(source + at + lane))
    if whole < words:
        mask = whole + lane < words
        tl.store(target + whole + lane, tl.load(source + whole + lane, mask=mask), mask=mask)


kernel: Any = triton.jit(_copy)


def launch(table: Any, owners: Any, chunks: int) -> None:
    """Queue the chunks of a table on torch's current stream."""
    kernel[(chunks,)](table, owners, chunk=CHUNK, block=BLOCK, num_warps=WARPS)
