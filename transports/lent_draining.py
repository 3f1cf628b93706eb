"""A receiver's way through a ring on a GPU, which the trainer lends: into memory of that GPU, or into the host's.

While the replica serves copies go at the ticket's pace, piece by piece. That paces the trainer as well, whose copies
go through the same memory: it is one ring ahead at most.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final

from pitstop.engine.errors import WorkerFailed
from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec, Ticket
from pitstop.transports.buckets import cut, place
from pitstop.transports.digest import CHECK
from pitstop.transports.draining import Drainer, digested, view
from pitstop.transports.spare import spare
from pitstop.transports.throttle import PIECE_NBYTES, Throttle

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.transports.cuda_ring import RingMemory
    from pitstop.transports.draining import Places

_STEP_S: Final = 0.01
_COPIED_S: Final = 30.0
_POLL_S: Final = 1e-3  # where the next piece is not due yet: each question takes Python's lock from the model's steps
_SHARE: Final = 3  # of the time to receive in, the part that may go by in waits


class DeviceDrainer:
    """Implements `Drainer` into memory of the GPU itself: spare, or `live` (`WeightSink.places`)."""

    def __init__(self, ticket: Ticket, ring: RingMemory, live: Places) -> None:
        import torch

        from pitstop.transports.cuda_ring import Drainer as CudaDrainer

        specs = [placed.spec for placed in ticket.tensors]
        self._ticket, self._staged = ticket, not ticket.in_place
        if self._staged:
            spare.claim(ticket)
        try:
            spare.drop()
            places = None if self._staged else live
            self._drainer = CudaDrainer(ring, specs, ticket.slots, ticket.slot_nbytes, live=places)
        except BaseException as error:
            spare.free(ticket)
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise WorkerFailed(
                f"no memory on {ticket.device} to stage a version: ask for mode in_place, or leave the engine less "
                f"for its cache ({str(error).partition('.')[0]})",
                operation="receive", rank=ticket.rank, replica=ticket.replica,
            ) from None  # fmt: skip
        self._throttle = _throttle(ticket)
        self._whole: list[int] = []

    @property
    def buckets(self) -> int:
        """How many there are."""
        return self._drainer.buckets

    def drain(self, first: int, end: int) -> Generator[int, None, None]:
        """See `Drainer.drain`. Unpaced all of them at once: each time the GPU has to be waited for."""
        if self._throttle is None:
            buckets, reading = range(first, end), self._drainer.reading(range(first, end), 1 << 62)
        else:
            buckets = range(first, first + 1)
            reading = self._drainer.reading(buckets, PIECE_NBYTES, poll=_POLL_S)
        with closing(reading) as pieces:
            for piece in pieces:
                for _ in _paced(self._throttle, piece):
                    yield first
        self._whole += self._drainer.whole(buckets)
        yield buckets.stop

    def complete(self) -> list[tuple[TensorSpec, Tensor]]:
        """See `Drainer.complete`."""
        whole, self._whole = self._whole, []
        return self._drainer.tensors(whole)

    def digests(self) -> tuple[int, ...]:
        """See `Drainer.digests`."""
        return tuple(self._drainer.digests().tolist())

    def close(self) -> int:
        """See `Drainer.close`."""
        self._whole.clear()
        del self._drainer
        if self._staged:
            import torch

            # Or a version's worth of memory would stay with torch, and not be seen as spare by the next refit.
            torch.cuda.empty_cache()
            spare.free(self._ticket)
        return 0


class LockedDrainer:
    """Implements `Drainer` out of a GPU's ring into page-locked host memory, for a GPU that has no room for a version.

    The GPU's copy engine copies, so that no program of the model's has to wait for its turn; and the processor
    digests, since what has to be proven is what lies in host memory.
    """

    def __init__(self, ticket: Ticket, ring: RingMemory) -> None:
        import numpy as np

        from pitstop.transports.cuda_memory import over
        from pitstop.transports.cuda_ring import Side

        self._ticket = ticket
        self._specs: Final = [placed.spec for placed in ticket.tensors]
        self._buckets: Final = cut(self._specs, ticket.slot_nbytes)
        self._device = ring.device
        self._nbytes = place(self._specs)[1]
        self._slots: Tensor = over(ring.address, ticket.slots * ticket.slot_nbytes, ring.device, ring)
        self._side = Side(ring.device)
        self._digests = np.zeros(len(self._specs), np.uint64)
        self._throttle = _throttle(ticket)
        self._settled = True
        spare.claim(ticket)
        try:
            self._memory: Tensor | None = spare.take(self._nbytes, ring.device)
        except BaseException:
            spare.free(ticket)
            raise

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)

    def drain(self, first: int, end: int) -> Generator[int, None, None]:
        """See `Drainer.drain`. One, whose slot is free when it has been copied, and not only when it is digested."""
        bucket, slot_nbytes = first, self._ticket.slot_nbytes
        memory = self._memory
        assert memory is not None
        self._settled = False
        # Buckets are full but for the last, so a version lies in memory as its buckets do, one behind the other.
        begin, slot = bucket * slot_nbytes, bucket % self._ticket.slots * slot_nbytes
        nbytes = min(slot_nbytes, self._nbytes - begin)
        try:
            for low in range(0, nbytes, PIECE_NBYTES):
                count = min(PIECE_NBYTES, nbytes - low)
                for _ in _paced(self._throttle, count):
                    yield bucket
                with self._side.use():
                    source = self._slots[slot + low : slot + low + count]
                    memory[begin + low : begin + low + count].copy_(source, non_blocking=True)
        finally:
            self._side.settle(_COPIED_S, self)
            self._settled = True
        yield bucket + 1
        table = []
        for part in self._buckets[bucket]:
            here = memory.data_ptr() + begin + part.offset
            table.append((ITEMSIZE[self._specs[part.row].dtype], here, here, part.count, part.start))
        for _ in digested(CHECK, table, self._buckets[bucket], self._digests):
            yield bucket + 1

    def complete(self) -> list[tuple[TensorSpec, Tensor]]:
        """See `Drainer.complete`. All of them, at the end."""
        memory = self._memory
        assert memory is not None
        return [(placed.spec, view(memory, placed.spec, placed.offset)) for placed in self._ticket.tensors]

    def digests(self) -> tuple[int, ...]:
        """See `Drainer.digests`."""
        return tuple(self._digests.tolist())

    def close(self) -> int:
        """See `Drainer.close`."""
        if self._memory is None:
            return 0
        if not self._settled:
            # The GPU may still write to it: it is kept, by who waits for that, and is no memory for the next version.
            spare.free(self._ticket)
            return 0
        memory, self._memory = self._memory, None
        spare.free(self._ticket, memory, self._device)
        return memory.nbytes


def lent_drainer(ticket: Ticket, handle: bytes, nbytes: int, live: Places) -> Drainer:
    """Return what drains the ring that a trainer lends, into where the ticket says, or into `live` memory."""
    from pitstop.transports import cuda_memory

    ring = cuda_memory.borrow(ticket.address, cuda_memory.device_of(ticket.device), handle, nbytes)
    return LockedDrainer(ticket, ring) if ticket.staging == "host" else DeviceDrainer(ticket, ring, live)


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


def _throttle(ticket: Ticket) -> Throttle | None:
    if not ticket.pace:
        return None
    now, nbytes = monotonic(), sum(placed.spec.nbytes for placed in ticket.tensors)
    return Throttle(nbytes, ticket.pace, now, now + ticket.receive_s / _SHARE)


def _paced(throttle: Throttle | None, nbytes: int) -> Iterator[None]:
    """Wait until so much may be copied, a few milliseconds at a time."""
    if throttle is not None:
        while (seconds := throttle.wait(monotonic())) > 0:
            sleep(min(seconds, _STEP_S))
            yield
        throttle.spend(nbytes, monotonic())
