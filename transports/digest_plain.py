"""What `digest_kernels.run` does, without numba: correct, and slow."""

from __future__ import annotations

from ctypes import c_char, memmove
from typing import Any

from pitstop.transports.digest import CHECK, NARROW, reference


def run(kind: Any, source: Any, target: Any, count: Any, start: Any, row: Any, digests: Any) -> None:
    """Add each piece's digest to its row's. Counts are words."""
    import numpy as np

    for p in range(kind.size):
        what, width, n = int(kind[p]) & ~15, int(kind[p]) & 15, int(count[p])
        if not n:
            continue
        data = memoryview((c_char * (n * width)).from_address(int(source[p]))).cast("B")
        if what == NARROW:
            wide = np.frombuffer(data, np.uint32)
            top = wide >> np.uint32(16)
            rounded = (wide + np.uint32(0x7FFF) + (top & np.uint32(1))) >> np.uint32(16)
            is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            data = memoryview(np.where(is_nan, top | np.uint32(0x40), rounded).astype(np.uint16).tobytes())
            width = 2
        if what != CHECK:
            memmove(int(target[p]), np.frombuffer(data, np.uint8).ctypes.data, len(data))
        total = int(digests[row[p]]) + reference(data, width, int(start[p]))
        digests[row[p]] = total % (1 << 64)
