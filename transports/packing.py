"""Writing tensors into a segment and proving them in one: what senders and receivers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from pitstop.engine.errors import DigestMismatch, ProtocolViolation, names
from pitstop.engine.worker_ports import ITEMSIZE, Manifest, Placed, TensorSpec
from pitstop.transports.digest import CHECK, Work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pitstop.transports.segment import Mapping

_FLUSH: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a row goes: tensor `index` of the offer, as `dtype`, at `offset` of the buffer.

    Or a part of it: `count` elements, from its flat element `start` on. None: all. A row need not begin where its
    tensor does: its element 0 is the tensor's flat element `base`.
    """

    index: int
    dtype: str
    offset: int
    start: int = 0
    count: int | None = None
    base: int = 0


@runtime_checkable
class Source(Protocol):
    """What a publisher reads from. It must not change from the offer until `pack` has ended."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return what there is, in order."""

    def pack(self, slots: Sequence[Slot], into: Mapping, digests: NDArray[np.uint64]) -> Iterator[int]:
        """Write every slot and its digest, yielding the number of bytes done every few milliseconds.

        Called once for a whole version, or once a bucket, in order; a part's digest is that of its elements where they
        are in the row, so that the digests of its parts add up to a row's.

        Raises:
            CheckpointUnreadable: the files have changed or cannot be read.
        """

    def close(self) -> None:
        """Let go of what it reads from. Idempotent."""


def checked(specs: Sequence[TensorSpec], slots: Sequence[Slot], nbytes: int) -> None:
    """Raise `ProtocolViolation` if a slot is not a place for a tensor of the offer in a segment of `nbytes`."""
    last = 0
    for slot in slots:
        spec = row_of(specs, slot)
        end = slot.offset + spec.nbytes
        if slot.offset < last or end > nbytes:
            raise ProtocolViolation(f"{spec.name} does not fit where the engine wants it", tensor=spec.name)
        last = end


def row_of(specs: Sequence[TensorSpec], slot: Slot) -> TensorSpec:
    """Return what a whole row is that goes to a slot; a part of a tensor is flat."""
    if slot.index >= len(specs):
        raise ProtocolViolation(f"the engine asks for tensor {slot.index} of {len(specs)}")
    spec = specs[slot.index]
    if slot.count is None:
        return TensorSpec(spec.name, slot.dtype, spec.shape)
    if slot.base + slot.count > prod(spec.shape):
        raise ProtocolViolation(f"the engine asks for more of {spec.name} than it has", tensor=spec.name)
    return TensorSpec(spec.name, slot.dtype, (slot.count,))


def slots_of(manifest: Manifest, offsets: Iterable[int]) -> list[Slot]:
    """Return where each row of a manifest goes."""
    return [
        Slot(row.index, row.spec.dtype, offset)
        if row.start is None
        else Slot(row.index, row.spec.dtype, offset, 0, prod(row.spec.shape), row.start)
        for row, offset in zip(manifest.rows, offsets, strict=False)
    ]


class Checks:
    """Digests parts of a segment soon after they were written, many small ones at a time."""

    def __init__(self, digests: NDArray[np.uint64]) -> None:
        self._digests = digests
        self._parts: list[tuple[int, int, int, int, int]] = []
        self._nbytes = 0

    def add(self, row: int, address: int, itemsize: int, count: int, start: int) -> Iterator[int]:
        """Digest `count` elements, the first of which is the row's element `start`; now or with the next ones."""
        self._parts.append((row, address, itemsize, count, start))
        self._nbytes += itemsize * count
        if self._nbytes >= _FLUSH:
            yield from self.flush()

    def flush(self) -> Iterator[int]:
        """Digest what has been put off."""
        import numpy as np

        if not self._parts:
            return
        row, address, itemsize, count, start = np.array(self._parts, np.uint64).T.copy()
        self._parts.clear()
        self._nbytes = 0
        work = Work(CHECK, itemsize.astype(np.int64), address, address, count.astype(np.int64), start.astype(np.int64))
        yield from work
        np.add.at(self._digests, row.astype(np.int64), work.digests)


class Proof:
    """Digests of a whole segment against a trailer. Made once for a layout, used every refit, while it is mapped."""

    def __init__(self, placed: Sequence[Placed], mapping: Mapping) -> None:
        import numpy as np

        self._names = [place.spec.name for place in placed]
        width = np.array([ITEMSIZE[place.spec.dtype] for place in placed], np.int64)
        nbytes = np.array([place.spec.nbytes for place in placed], np.int64)
        offset = np.array([place.offset for place in placed], np.uint64)
        address = offset + np.uint64(mapping.address)
        if placed and int(offset[-1]) + int(nbytes[-1]) > mapping.nbytes:
            raise ProtocolViolation(f"{self._names[-1]} lies outside the segment", tensor=self._names[-1])
        self._work = Work(CHECK, width, address, address, nbytes // width)

    def differing(self, digests: Sequence[int]) -> Iterator[int]:
        """Digest everything, yielding the number of bytes done every few milliseconds.

        Raises:
            DigestMismatch: names the tensors that are not what was sent.
        """
        import numpy as np

        if len(digests) != len(self._names):
            raise ProtocolViolation(f"{len(digests)} digests for {len(self._names)} tensors")
        yield from self._work
        wrong = np.flatnonzero(self._work.digests != np.array(digests, np.uint64)).tolist()
        if wrong:
            differ = [self._names[row] for row in wrong]
            raise DigestMismatch(
                f"{len(differ)} of {len(self._names)} tensors are not what was sent: {names(differ)}",
                tensor=differ[0],
                count=len(differ),
            )
