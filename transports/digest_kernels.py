"""The digest's definition (see `digest`), fused with a copy or a cast and compiled by numba. Imported on demand.

Compiled without the GIL, one call for many tensors: ten thousand small ones cost what three hundred large ones do.

A word has 16 bits and a key 64, so their product is two 32-bit multiplications, which vectorise everywhere and cost
a fraction of a 64-bit one. Indices are those of slices, so that the compiler need not allow for negative ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pitstop.transports.digest import BLOCK, STEP, lanes

_LANES = lanes()
_BLOCK = BLOCK
_STEP = np.uint64(STEP)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _compiled(function: Callable[..., Any], *signature: str) -> Any:
    try:
        return njit(*signature, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder that numba could keep its cache in
        return njit(*signature, nogil=True)(function)


def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


def _closed(low: Any, high: Any, words: Any, block: Any) -> Any:
    z = np.uint64(block + 1025) * _STEP
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    key = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return (low + (high << _32)) * key + np.uint64(words) * _STEP


def _check(x: Any, start: Any) -> Any:
    total = np.uint64(0)
    done = 0
    while done < x.size:
        block = (start + done) // _BLOCK
        lane = (start + done) % _BLOCK
        words = min(x.size - done, _BLOCK - lane)
        low = np.uint64(0)
        high = np.uint64(0)
        now = x[done : done + words]
        keys = _LANES[lane : lane + words]
        for i in range(now.size):
            word = np.uint64(now[i])
            low += word * (keys[i] & _LOW)
            high += word * (keys[i] >> _32)
        total += closed(low, high, words, block)
        done += words
    return total


def _copy(x: Any, y: Any, start: Any) -> Any:
    total = np.uint64(0)
    done = 0
    while done < x.size:
        block = (start + done) // _BLOCK
        lane = (start + done) % _BLOCK
        words = min(x.size - done, _BLOCK - lane)
        low = np.uint64(0)
        high = np.uint64(0)
        now = x[done : done + words]
        then = y[done : done + words]
        keys = _LANES[lane : lane + words]
        for i in range(now.size):
            bits = now[i]
            then[i] = bits
            word = np.uint64(bits)
            low += word * (keys[i] & _LOW)
            high += word * (keys[i] >> _32)
        total += closed(low, high, words, block)
        done += words
    return total


def _narrow(x: Any, y: Any, start: Any) -> Any:
    total = np.uint64(0)
    done = 0
    while done < x.size:
        block = (start + done) // _BLOCK
        lane = (start + done) % _BLOCK
        words = min(x.size - done, _BLOCK - lane)
        low = np.uint64(0)
        high = np.uint64(0)
        now = x[done : done + words]
        then = y[done : done + words]
        keys = _LANES[lane : lane + words]
        for i in range(now.size):
            wide = now[i]
            top = wide >> np.uint32(16)
            rounded = (wide + np.uint32(0x7FFF) + (top & np.uint32(1))) >> np.uint32(16)
            # Rounding could carry a NaN's bits into infinity or over the sign: it is made quiet instead.
            is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            bits = np.uint16(top | np.uint32(0x40) if is_nan else rounded)
            then[i] = bits
            word = np.uint64(bits)
            low += word * (keys[i] & _LOW)
            high += word * (keys[i] >> _32)
        total += closed(low, high, words, block)
        done += words
    return total


def _run(kind: Any, source: Any, target: Any, count: Any, start: Any, row: Any, digests: Any) -> None:
    for p in range(kind.size):
        k = kind[p]
        s = pointer(source[p])
        t = pointer(target[p])
        n = count[p]
        i = start[p]
        part = np.uint64(0)
        if k == 2:
            part = copy(carray(s, n, np.uint16), carray(t, n, np.uint16), i)
        elif k == 18:
            part = check(carray(s, n, np.uint16), i)
        elif k == 36:
            part = narrow(carray(s, n, np.uint32), carray(t, n, np.uint16), i)
        elif k == 1:
            part = copy(carray(s, n, np.uint8), carray(t, n, np.uint8), i)
        elif k == 17:
            part = check(carray(s, n, np.uint8), i)
        digests[row[p]] += part


pointer: Any = intrinsic(_pointer)
closed = _compiled(_closed)
check = _compiled(_check)
copy = _compiled(_copy)
narrow = _compiled(_narrow)
run = _compiled(_run, "void(int64[::1],uint64[::1],uint64[::1],int64[::1],int64[::1],int64[::1],uint64[::1])")
"""run(kind, source, target, count, start, row, digests): add each piece's digest to its row's. Counts are words."""
