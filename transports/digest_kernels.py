"""The digest's definition (see `digest`), fused with a copy or a cast and compiled by numba. Imported on demand.

Compiled without the GIL, one call for many tensors: ten thousand small ones cost what three hundred large ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)


def _compiled(function: Callable[..., Any], *signature: str) -> Any:
    try:
        return njit(*signature, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder that numba could keep its cache in
        return njit(*signature, nogil=True)(function)


def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


def _check(x: Any, start: Any) -> Any:
    squares = np.uint64(0)
    plain = np.uint64(0)
    key = (np.uint64(start) + _ONE) * _STEP
    for i in range(x.size):
        w = np.uint64(x[i]) + key
        key += _STEP
        w ^= w >> _SHIFT
        squares += w * w
        plain += w
    return squares + squares + plain


def _copy(x: Any, y: Any, start: Any) -> Any:
    squares = np.uint64(0)
    plain = np.uint64(0)
    key = (np.uint64(start) + _ONE) * _STEP
    for i in range(x.size):
        bits = x[i]
        y[i] = bits
        w = np.uint64(bits) + key
        key += _STEP
        w ^= w >> _SHIFT
        squares += w * w
        plain += w
    return squares + squares + plain


def _narrow(x: Any, y: Any, start: Any) -> Any:
    squares = np.uint64(0)
    plain = np.uint64(0)
    key = (np.uint64(start) + _ONE) * _STEP
    for i in range(x.size):
        wide = x[i]
        high = wide >> np.uint32(16)
        rounded = (wide + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
        # Rounding could carry a NaN's bits into infinity or over the sign: it is made quiet instead.
        is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        bits = np.uint16(high | np.uint32(0x40) if is_nan else rounded)
        y[i] = bits
        w = np.uint64(bits) + key
        key += _STEP
        w ^= w >> _SHIFT
        squares += w * w
        plain += w
    return squares + squares + plain


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
        elif k == 4:
            part = copy(carray(s, n, np.uint32), carray(t, n, np.uint32), i)
        elif k == 1:
            part = copy(carray(s, n, np.uint8), carray(t, n, np.uint8), i)
        elif k == 8:
            part = copy(carray(s, n, np.uint64), carray(t, n, np.uint64), i)
        elif k == 18:
            part = check(carray(s, n, np.uint16), i)
        elif k == 20:
            part = check(carray(s, n, np.uint32), i)
        elif k == 17:
            part = check(carray(s, n, np.uint8), i)
        elif k == 24:
            part = check(carray(s, n, np.uint64), i)
        elif k == 36:
            part = narrow(carray(s, n, np.uint32), carray(t, n, np.uint16), i)
        digests[row[p]] += part


pointer: Any = intrinsic(_pointer)
check = _compiled(_check)
copy = _compiled(_copy)
narrow = _compiled(_narrow)
run = _compiled(_run, "void(int64[::1],uint64[::1],uint64[::1],int64[::1],int64[::1],int64[::1],uint64[::1])")
"""run(kind, source, target, count, start, row, digests): add each piece's digest to its row's."""
