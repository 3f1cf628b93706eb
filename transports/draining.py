"""A receiver's way through a ring: out of each slot, into memory of its own, digested on the way."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from pitstop.engine.errors import DigestMismatch, ProtocolViolation, names
from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec, Ticket
from pitstop.transports.buckets import Part, cut, place
from pitstop.transports.digest import COPY, Work
from pitstop.transports.spare import spare

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pitstop.transports import segment

    Places = Mapping[str, Tensor]


class Drainer(Protocol):
    """Takes buckets out of a ring, in order."""

    @property
    def buckets(self) -> int:
        """How many there are."""

    def drain(self, first: int, end: int) -> Generator[int, None, None]:
        """Copy and digest some of those from `first` to before `end`, at least one; yield every few milliseconds.

        The number it yields is that of the next bucket; nothing looks into the slots of those before it any more.
        Close it if it is not gone through to its end.
        """

    def complete(self) -> list[tuple[TensorSpec, Tensor]]:
        """Return the tensors that have become whole since the last call, unproven."""

    def digests(self) -> tuple[int, ...]:
        """Return every row's digest, when all buckets have been drained."""

    def close(self) -> int:
        """Let go of what it holds; tensors that were taken in place stay whole.

        Return how many bytes of host memory are kept for the next version.
        """


class HostDrainer:
    """Implements `Drainer` in host memory.

    Staged, all tensors lie in one piece of memory that the process keeps for the next refit, since memory that is
    touched for the first time takes several times longer. In place, each has memory of its own, or its place in
    `live` memory (by name: `WeightSink.places`).
    """

    def __init__(self, ticket: Ticket, mapping: segment.Mapping, live: Places) -> None:
        import numpy as np

        self._specs: Final = [placed.spec for placed in ticket.tensors]
        self._buckets: Final = cut(self._specs, ticket.slot_nbytes)
        self._ticket = ticket
        self._mapping = mapping
        self._left = [spec.nbytes // ITEMSIZE[spec.dtype] for spec in self._specs]
        self._ready: list[int] = []
        self._tensors: dict[int, Tensor] = {}
        self._digests = np.zeros(len(self._specs), np.uint64)
        self._spare: Tensor | None = None
        if ticket.in_place:
            spare.drop()  # who asks for no spare copy has none, that of an earlier refit included
            self._tensors |= {row: live[spec.name] for row, spec in enumerate(self._specs) if spec.name in live}
        else:
            spare.claim(ticket)
            self._spare = spare.take(place(self._specs)[1])
            for row, placed in enumerate(ticket.tensors):
                self._tensors[row] = view(self._spare, placed.spec, placed.offset)

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)

    def drain(self, first: int, end: int) -> Generator[int, None, None]:
        """See `Drainer.drain`. One, so that its slot is free again as soon as may be."""
        bucket = first
        slot = self._mapping.address + bucket % self._ticket.slots * self._ticket.slot_nbytes
        parts = self._buckets[bucket]
        table = []
        for part in parts:
            width = ITEMSIZE[self._specs[part.row].dtype]
            here = self._tensor(part.row).data_ptr() + part.start * width
            table.append((width, slot + part.offset, here, part.count, part.start))
        for _ in digested(COPY, table, parts, self._digests):
            yield first
        for part in parts:
            self._left[part.row] -= part.count
            if not self._left[part.row]:
                self._ready.append(part.row)
        yield bucket + 1

    def complete(self) -> list[tuple[TensorSpec, Tensor]]:
        """See `Drainer.complete`."""
        ready, self._ready = self._ready, []
        return [(self._specs[row], self._tensors.pop(row)) for row in ready]

    def digests(self) -> tuple[int, ...]:
        """See `Drainer.digests`."""
        return tuple(self._digests.tolist())

    def close(self) -> int:
        """See `Drainer.close`."""
        memory, self._spare = self._spare, None
        self._tensors.clear()
        if memory is None:
            return 0
        spare.free(self._ticket, memory)
        return memory.nbytes

    def _tensor(self, row: int) -> Tensor:
        import torch

        if row not in self._tensors:
            spec = self._specs[row]
            self._tensors[row] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        return self._tensors[row]


def proven(specs: Sequence[TensorSpec], found: Sequence[int], digests: Sequence[int]) -> None:
    """Compare what was received with a trailer.

    Raises:
        DigestMismatch: names the tensors that are not what was sent.
        ProtocolViolation: the trailer is of something else.
    """
    if len(digests) != len(specs):
        raise ProtocolViolation(f"{len(digests)} digests for {len(specs)} tensors")
    differ = [spec.name for spec, one, other in zip(specs, found, digests, strict=True) if one != other]
    if differ:
        raise DigestMismatch(
            f"{len(differ)} of {len(specs)} tensors are not what was sent: {names(differ)}",
            tensor=differ[0],
            count=len(differ),
        )


def digested(
    kind: int, table: Sequence[tuple[int, int, int, int, int]], parts: Sequence[Part], digests: NDArray[np.uint64]
) -> Iterator[int]:
    """Work through a bucket's parts (width, source, target, count, start), and add up their rows' digests."""
    import numpy as np

    width, source, target, count, start = np.array(table, np.uint64).T.copy()
    work = Work(kind, width.astype(np.int64), source, target, count.astype(np.int64), start.astype(np.int64))
    yield from work
    np.add.at(digests, [part.row for part in parts], work.digests)


def view(memory: Tensor, spec: TensorSpec, offset: int) -> Tensor:
    """Return a tensor that lies at a byte of some memory."""
    import torch

    view: Tensor = memory[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
    return view
