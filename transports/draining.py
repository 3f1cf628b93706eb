"""A receiver's way through a ring: out of each slot, into memory of its own, digested on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final, Protocol

from pitstop.engine.errors import DigestMismatch, ProtocolViolation, WorkerFailed, names
from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec, Ticket
from pitstop.transports.buckets import cut, place
from pitstop.transports.digest import COPY, Work

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.transports.segment import Mapping


class Drainer(Protocol):
    """Takes buckets out of a ring, in order."""

    @property
    def buckets(self) -> int:
        """How many there are."""

    def drain(self, first: int, end: int) -> Iterator[int]:
        """Copy and digest some of those from `first` to before `end`, at least one; yield every few milliseconds.

        The last number it yields is that of the next bucket; nothing looks into the slots of those before it then.
        """

    def complete(self) -> list[tuple[TensorSpec, Tensor]]:
        """Return the tensors that have become whole since the last call, unproven."""

    def digests(self) -> tuple[int, ...]:
        """Return every row's digest, when all buckets have been drained."""

    def close(self) -> None:
        """Let go of what it holds; tensors that were taken in place stay whole."""


class HostDrainer:
    """Implements `Drainer` in host memory.

    Staged, all tensors lie in one piece of memory that the process keeps for the next refit, since memory that is
    touched for the first time takes several times longer. In place, each has memory of its own.
    """

    def __init__(self, ticket: Ticket, mapping: Mapping) -> None:
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
            _spare.drop()  # who asks for no spare copy has none, that of an earlier refit included
        else:
            self._spare = _spare.take(place(self._specs)[1])
            for row, placed in enumerate(ticket.tensors):
                self._tensors[row] = _view(self._spare, placed.spec, placed.offset)

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)

    def drain(self, first: int, end: int) -> Iterator[int]:
        """See `Drainer.drain`. One, so that its slot is free again as soon as may be."""
        import numpy as np

        bucket = first
        slot = self._mapping.address + bucket % self._ticket.slots * self._ticket.slot_nbytes
        parts = self._buckets[bucket]
        table = []
        for part in parts:
            width = ITEMSIZE[self._specs[part.row].dtype]
            here = self._tensor(part.row).data_ptr() + part.start * width
            table.append((width, slot + part.offset, here, part.count, part.start))
        width, source, target, count, start = np.array(table, np.uint64).T.copy()
        work = Work(COPY, width.astype(np.int64), source, target, count.astype(np.int64), start.astype(np.int64))
        for _ in work:
            yield first
        np.add.at(self._digests, [part.row for part in parts], work.digests)
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

    def close(self) -> None:
        """See `Drainer.close`."""
        spare, self._spare = self._spare, None
        self._tensors.clear()
        if spare is not None:
            _spare.give(spare)

    def _tensor(self, row: int) -> Tensor:
        import torch

        if row not in self._tensors:
            spec = self._specs[row]
            self._tensors[row] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        return self._tensors[row]


class DeviceDrainer:
    """Implements `Drainer` on the GPU where the trainer lends its ring."""

    def __init__(self, ticket: Ticket, handle: bytes, nbytes: int) -> None:
        import torch

        from pitstop.transports import cuda_memory
        from pitstop.transports.cuda_ring import Drainer as CudaDrainer

        self._ring = cuda_memory.borrow(ticket.address, cuda_memory.device_of(ticket.device), handle, nbytes)
        specs = [placed.spec for placed in ticket.tensors]
        try:
            self._drainer = CudaDrainer(self._ring, specs, ticket.slots, ticket.slot_nbytes, in_place=ticket.in_place)
        except torch.OutOfMemoryError as error:
            raise WorkerFailed(
                f"no memory on {ticket.device} to stage a version: ask for mode in_place, or leave the engine less "
                f"for its cache ({str(error).partition('.')[0]})",
                operation="receive", rank=ticket.rank, replica=ticket.replica,
            ) from None  # fmt: skip
        self._whole: list[int] = []

    @property
    def buckets(self) -> int:
        """How many there are."""
        return self._drainer.buckets

    def drain(self, first: int, end: int) -> Iterator[int]:
        """See `Drainer.drain`. All of them at once: each time the GPU has to be waited for."""
        self._whole += self._drainer.drain(*range(first, end))
        yield end

    def complete(self) -> list[tuple[TensorSpec, Tensor]]:
        """See `Drainer.complete`."""
        whole, self._whole = self._whole, []
        return self._drainer.tensors(whole)

    def digests(self) -> tuple[int, ...]:
        """See `Drainer.digests`."""
        return tuple(self._drainer.digests().tolist())

    def close(self) -> None:
        """See `Drainer.close`."""
        staged = self._drainer.buffer is not None
        self._whole.clear()
        del self._drainer
        if staged:
            import torch

            # Or a version's worth of memory would stay with torch, and not be seen as spare by the next refit.
            torch.cuda.empty_cache()


def prepare_device(device: str) -> None:
    """Have the kernels of a device (torch's name of it) compiled."""
    if device.startswith("cuda"):
        import torch

        from pitstop.transports import digest_cuda

        digest_cuda.prepare(torch.device(device))


def forget_lent(engine: str) -> None:
    """Unmap what a trainer has lent, as soon as nothing uses it: the trainer may be gone, and its memory not free."""
    from pitstop.transports import cuda_memory

    cuda_memory.forget(engine)


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


def _view(memory: Tensor, spec: TensorSpec, offset: int) -> Tensor:
    import torch

    view: Tensor = memory[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
    return view


class _Spare:
    """Memory that the last staged refit used, for the next one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._memory: Tensor | None = None

    def take(self, nbytes: int) -> Tensor:
        import torch

        with self._lock:
            memory, self._memory = self._memory, None
        if memory is not None and memory.nbytes >= nbytes:
            return memory
        del memory
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, memory: Tensor) -> None:
        with self._lock:
            self._memory = memory

    def drop(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
        del memory  # which takes its time


_spare: Final = _Spare()
