"""The digest of a tensor, defined once for every transport and device.

Read the tensor's content, flat and row-major in the dtype in which it travels, as unsigned little-endian words of
16 bits (an element of 4 or 8 bytes is two or four of them; an element of one byte is a word by itself). Let `x[i]`
be the word with global index `i`, and `S(n)` the n-th output (from 1) of splitmix64 seeded with 0, made odd by
setting its lowest bit. With all arithmetic modulo 2**64:

    K(i)   = S(1025 + i // 1024) * S(1 + i % 1024)
    digest = sum over i of (x[i] * K(i) + 0x9E3779B97F4A7C15)

- The sum makes it additive: digests of shards, computed with their elements' global indices, add up to the
  tensor's, whatever the layout. An empty tensor's digest is 0.
- `K(i)` is odd, so any change of one word changes the digest: always, not just probably. Two flipped bits and two
  swapped words within 1024 are caught always as well (the test of it looks at all pairs of keys).
- Keys are pseudo-random, so whatever else differs (rows swapped, a slice shifted, a tail missing or stale) goes
  unnoticed with a chance of 2**-49 at worst. The constant counts the words: zeros at the end are not nothing.
- It says nothing about dtype and shape, which the manifest declares, nor about the name: two tied tensors with the
  same content have the same digest. It is no protection against someone who wants a collision.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CALL_BYTES: Final = 32 << 20
"""Most source bytes of one call into the kernels: a few milliseconds, between which a thread beats and listens."""

STEP: Final = 0x9E3779B97F4A7C15
BLOCK: Final = 1024

COPY: Final = 0  #: copy and digest
CHECK: Final = 16  #: digest the source, copy nothing
NARROW: Final = 32  #: round float32 to bfloat16 (to nearest, ties to even) on the way, and digest the result

_LOADING_S: Final = 0.1
_LOG: Final = logging.getLogger(__name__)
_preparing: Final = threading.Lock()
_loading: Final = threading.Lock()
_kernels: Final[list[Future[Any]]] = []


def odd_words(first: int, count: int) -> NDArray[np.uint64]:
    """Return S(first) to S(first + count - 1) of the definition."""
    import numpy as np

    z = (np.arange(count, dtype=np.uint64) + np.uint64(first)) * np.uint64(STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@cache
def lanes() -> NDArray[np.uint64]:
    """Return the keys' factors within a block."""
    return odd_words(1, BLOCK)


def reference(content: bytes | bytearray | memoryview, itemsize: int, start: int = 0) -> int:
    """Return the digest of packed elements of `itemsize` bytes, the first of which has global index `start`.

    Written as the definition reads: the kernels are tested against it, and it stands in where there are none.
    """
    import numpy as np

    width = min(itemsize, 2)
    words = np.frombuffer(content, f"<u{width}")
    first, total = start * (itemsize // width), 0
    while words.size:
        block, lane = divmod(first, BLOCK)
        now, words = words[: BLOCK - lane], words[BLOCK - lane :]
        keys = lanes()[lane : lane + now.size] * odd_words(1025 + block, 1)
        total += int((now.astype(np.uint64) * keys).sum(dtype=np.uint64)) + STEP * now.size
        first += now.size
    return total % (1 << 64)


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
    with _loading:
        try:
            future.set_result(_kernel())
        except BaseException as error:
            future.set_exception(error)
            raise


def _before_fork() -> None:
    # A child has no thread that would finish the loading, and would find numba's compiler locked for ever.
    _preparing.acquire()
    _loading.acquire()


def _after_fork() -> None:
    _loading.release()
    _preparing.release()


def _in_child() -> None:
    _after_fork()
    if _kernels and not _kernels[0].done():
        _kernels.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


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

    `kind` is COPY, CHECK or NARROW, a row. `start` is the global index of a row's first element. Whoever makes one
    keeps the memory alive; targets must not overlap sources. `digests` is whole once it has been iterated over.
    """

    def __init__(
        self,
        kind: int,
        itemsize: NDArray[np.int64],
        source: NDArray[np.uint64],
        target: NDArray[np.uint64],
        count: NDArray[np.int64],
        start: NDArray[np.int64] | None = None,
    ) -> None:
        import numpy as np

        # The kernels know words, and for a cast the elements that become words.
        width = itemsize if kind == NARROW else np.minimum(itemsize, 2)
        count = count * (itemsize // width)
        first = np.zeros_like(count) if start is None else start * (itemsize // width)
        most = CALL_BYTES // width
        pieces = np.maximum(-(-count // most), 1)
        self._row = np.repeat(np.arange(count.size, dtype=np.int64), pieces)
        ahead = np.repeat(np.cumsum(pieces) - pieces, pieces)
        skipped = (np.arange(self._row.size, dtype=np.int64) - ahead) * most[self._row]
        written = np.full_like(width, 2) if kind == NARROW else width
        self._kind = kind + width[self._row]
        self._count = np.minimum(count[self._row] - skipped, most[self._row])
        self._start = skipped + first[self._row]
        self._source = source[self._row] + (skipped * width[self._row]).astype(np.uint64)
        self._target = target[self._row] + (skipped * written[self._row]).astype(np.uint64)
        nbytes = self._count * width[self._row]
        group = (np.cumsum(nbytes) - nbytes) // CALL_BYTES
        self._cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), int(self._row.size)]
        self._nbytes = np.add.reduceat(nbytes, self._cuts[:-1]).tolist() if self._row.size else []
        self.digests: NDArray[np.uint64] = np.zeros(count.size, np.uint64)

    def __iter__(self) -> Iterator[int]:
        """Do the work, yielding the number of source bytes done after each call.

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
