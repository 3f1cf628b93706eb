"""The digest of a tensor, defined once for every transport and device.

Let `x[i]` be the bits of the element with flat, row-major, global index `i` (from 0), read as an unsigned
little-endian integer, in the dtype in which the tensor travels. With all arithmetic modulo 2**64:

    k(i)   = (i + 1) * 0x9E3779B97F4A7C15
    v      = x[i] + k(i)
    w      = v ^ (v >> 32)
    digest = sum over i of (2 * w * w + w)

- The sum makes it additive: digests of shards, computed with their elements' global indices, add up to the
  tensor's, whatever the layout. An empty tensor's digest is 0.
- For a fixed index each step is a bijection (`2*w*w + w` is a permutation polynomial modulo 2**64), so any change
  of one element, of one bit or of all of them, changes the digest: always, not just probably.
- Mixing the index in before a shift and a square makes it sensitive to order: elements swapped, slices shifted and
  tails left at zero change it, save for coincidences of about 2**-32 for contrived patterns and 2**-60 otherwise.
- It says nothing about dtype and shape, which the manifest declares, nor about the name: two tied tensors with the
  same content have the same digest. It is no protection against someone who wants a collision.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CALL_BYTES: Final = 32 << 20
"""Most source bytes of one call into the kernels: a few milliseconds, between which a thread beats and listens."""

_STEP: Final = 0x9E3779B97F4A7C15
_BLOCK: Final = 1 << 16
_MASK: Final = (1 << 64) - 1
_LOADING_S: Final = 0.1
_LOG: Final = logging.getLogger(__name__)
_preparing: Final = threading.Lock()
_kernels: Final[list[Future[Any]]] = []

COPY: Final = 0  #: copy and digest
CHECK: Final = 16  #: digest the source, copy nothing
NARROW: Final = 32  #: round float32 to bfloat16 (to nearest, ties to even) on the way, and digest the result


def reference(content: bytes | bytearray | memoryview, itemsize: int, start: int = 0) -> int:
    """Return the digest of packed elements of `itemsize` bytes, the first of which has global index `start`.

    Written as the definition reads; the kernels are tested against it, and stand in for it where speed matters.
    """
    import numpy as np

    step, shift = np.uint64(_STEP), np.uint64(32)
    elements = np.frombuffer(content, f"<u{itemsize}")
    total = 0
    for low in range(0, elements.size, _BLOCK):
        part = elements[low : low + _BLOCK]
        first = (start + low + 1) & _MASK
        v = part.astype(np.uint64) + (np.arange(part.size, dtype=np.uint64) + np.uint64(first)) * step
        w = v ^ (v >> shift)
        total += int((w * w).sum(dtype=np.uint64)) * 2 + int(w.sum(dtype=np.uint64))
    return total & _MASK


def prepare() -> Future[Any]:
    """Begin to load the kernels, in a thread, and return what they will be found in. Idempotent.

    That takes half a second in a process, and many where nothing is in numba's cache yet (`NUMBA_CACHE_DIR`, else
    beside the package, else in the user's cache folder). Worth calling when a process starts.
    """
    with _preparing:
        if not _kernels:
            _kernels.append(Future())
            threading.Thread(target=_prepare, args=(_kernels[0],), name="pitstop-kernels", daemon=True).start()
        return _kernels[0]


def _prepare(future: Future[Any]) -> None:
    try:
        future.set_result(_kernel())
    except BaseException as error:
        future.set_exception(error)
        raise


def _kernel() -> Any:
    try:
        from pitstop.transports.digest_kernels import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"numba", "llvmlite"}:
            raise
        _LOG.warning("numba is not installed: copies and digests of weights are about 20 times slower")
        from pitstop.transports.digest_plain import run
    return run


class Work:
    """Copies, casts and digests over raw addresses, cut into calls of at most `CALL_BYTES` each.

    `kind` is COPY, CHECK or NARROW plus the source's element size, a row. `start` is the global index of a row's
    first element. Whoever makes one keeps the memory alive; targets must not overlap sources.
    """

    def __init__(
        self,
        kind: NDArray[np.int64],
        source: NDArray[np.uint64],
        target: NDArray[np.uint64],
        count: NDArray[np.int64],
        start: NDArray[np.int64] | None = None,
    ) -> None:
        import numpy as np

        width = kind & 15
        read = np.minimum(CALL_BYTES // width, np.maximum(count, 1))
        pieces = np.maximum(-(-count // read), 1)
        self._row = np.repeat(np.arange(kind.size, dtype=np.int64), pieces)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        skipped = (np.arange(self._row.size, dtype=np.int64) - first) * read[self._row]
        written = np.where(kind >= NARROW, width // 2, width)
        self._kind = kind[self._row]
        self._count = np.minimum(count[self._row] - skipped, read[self._row])
        self._start = skipped if start is None else skipped + start[self._row]
        self._source = source[self._row] + (skipped * width[self._row]).astype(np.uint64)
        self._target = target[self._row] + (skipped * written[self._row]).astype(np.uint64)
        nbytes = self._count * width[self._row]
        group = (np.cumsum(nbytes) - nbytes) // CALL_BYTES
        self._cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), int(self._row.size)]
        self._nbytes = np.add.reduceat(nbytes, self._cuts[:-1]).tolist() if self._row.size else []
        self.digests: NDArray[np.uint64] = np.zeros(kind.size, np.uint64)

    def __iter__(self) -> Iterator[int]:
        """Do the work, yielding the number of source bytes done after each call. `digests` is whole at the end.

        While the kernels are still being loaded it yields 0 now and then.
        """
        loading = prepare()
        while not loading.done():
            wait((loading,), timeout=_LOADING_S)
            yield 0
        run = loading.result()
        self.digests[:] = 0
        for low, high, nbytes in zip(self._cuts, self._cuts[1:], self._nbytes, strict=False):
            run(
                self._kind[low:high],
                self._source[low:high],
                self._target[low:high],
                self._count[low:high],
                self._start[low:high],
                self._row[low:high],
                self.digests,
            )
            yield nbytes
