"""The two ends of a ring in a GPU's memory: a trainer pours buckets in, a receiver in another process drains them.

A CUDA event says when a bucket is whole, and no event crosses to the other process: each end waits for its own,
and only then says `filled`, or `drained`, in a message. So what is read was written, and what is overwritten has
been read. `pour` may be called for bucket n once `drained` is above n - slots; nothing here checks that.
A source is first read after the events of its making; in place, memory is first written after all that was queued
on the caller's stream when it was allocated, and what `drain` returns is whole for every stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from pitstop.engine.errors import DeadlineExceeded, LocalError
from pitstop.engine.worker_ports import TensorSpec
from pitstop.transports.buckets import cut, place
from pitstop.transports.digest_cuda import CudaWork
from pitstop.transports.digest_table import parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_POLL_S: Final = 5e-5
_stuck: Final[list[tuple[Fence, object]]] = []


class RingMemory(Protocol):
    """`LentRing`, `BorrowedRing`, or in tests any memory."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    @property
    def address(self) -> int:
        """Where it begins."""

    @property
    def nbytes(self) -> int:
        """Its size."""


class Fence(Protocol):
    """A point in what a GPU does."""

    def query(self) -> bool:
        """Return whether it has been passed."""


class Pourer:
    """The trainer's end, for one version. Usable from any thread, one at a time.

    `tensors` and `specs` are one a row: what is read, on the ring's device, and as what it travels (name, dtype,
    shape, or as many elements flat). `ready` are the events after which tensors may be read (`TensorSource`'s). The
    caller keeps the tensors unchanged until the last fence has passed.

    Raises:
        LocalError: a tensor lies elsewhere or has another size, or the ring is too small.
    """

    def __init__(
        self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec], ring: RingMemory, slots: int, slot_nbytes: int,
        ready: Iterable[Any] = (),
    ) -> None:  # fmt: skip
        _suits(ring, slots, slot_nbytes)
        self._ring, self._tensors = ring, tensors
        self._dtypes = [getattr(torch, spec.dtype) for spec in specs]
        self._addresses = np.zeros(len(specs), np.int64)
        self._made: dict[int, Tensor] = {}
        buckets = cut(specs, slot_nbytes)
        self.buckets: Final = len(buckets)
        lazy: set[int] = set()
        narrow = [False] * len(specs)
        for row, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            if tensor.device != ring.device or tensor.numel() != prod(spec.shape):
                where = f"{tuple(tensor.shape)} on {tensor.device}"
                raise LocalError(f"{spec.name} is {where}, not {spec.shape} on {ring.device}", tensor=spec.name)
            narrow[row] = (tensor.dtype, spec.dtype) == (torch.float32, "bfloat16")
            direct = narrow[row] or tensor.dtype == self._dtypes[row]
            if direct and tensor.is_contiguous() and not tensor.is_neg():
                self._addresses[row] = tensor.data_ptr()
            else:
                narrow[row] = False
                lazy.add(row)
        # Rows that need a copy in between, by the bucket, and how many parts of them are still to be poured.
        self._lazy = [[part.row for part in bucket if part.row in lazy] for bucket in buckets]
        self._left = Counter(row for bucket in self._lazy for row in bucket)
        self._side = Side(ring.device)
        parts = parts_of(specs, buckets, ring.address, slots, slot_nbytes, "source", narrow)
        with self._side.use():
            for event in ready:
                torch.cuda.current_stream(ring.device).wait_event(event)
            self._work = CudaWork(ring.device, len(specs), parts, "source", self._addresses)

    def pour(self, bucket: int) -> Fence:
        """Queue the writing of a bucket, each once; return what passes when it is whole."""
        with self._side.use():
            for row in self._lazy[bucket]:
                if row not in self._made:
                    made = self._tensors[row].to(self._dtypes[row]).resolve_neg().contiguous()
                    self._made[row] = made
                    self._addresses[row] = made.data_ptr()
            self._work.run(bucket, self._addresses)
            for row in self._lazy[bucket]:
                self._left[row] -= 1
                if not self._left[row]:
                    # Its memory can only go to what this stream queues later.
                    del self._made[row]
            return self._side.fence()

    def done(self, fence: Fence) -> bool:
        """Return whether a fence has been passed."""
        return fence.query()

    def wait(self, fence: Fence, seconds: float) -> bool:
        """Wait for a fence for so long; return whether it has been passed."""
        return _passed(fence, seconds)

    def digests(self) -> NDArray[np.uint64]:
        """Return the digest of every row, in order, once all buckets have been poured. Waits for the GPU."""
        with self._side.use():
            return self._work.digests()


class Drainer:
    """The receiver's end, for one version. Used from one thread.

    Staged, a version lies in one buffer (`buckets.place`); one of an earlier refit may be passed in. In place, `live`
    names memory that tensors go straight into (contiguous, of their dtype, on the ring's device). Each other one has
    memory of its own, which is allocated at its first part and is the caller's from `tensors` on.
    Memory of torch's: whoever reads it on another stream than it was made on, and drops it, uses `record_stream`.

    Raises:
        LocalError: the ring or the buffer is too small.
    """

    def __init__(
        self, ring: RingMemory, specs: Sequence[TensorSpec], slots: int, slot_nbytes: int, *,
        live: Mapping[str, Tensor] | None = None, buffer: Tensor | None = None,
    ) -> None:  # fmt: skip
        _suits(ring, slots, slot_nbytes)
        _stuck[:] = [(fence, drainer) for fence, drainer in _stuck if not fence.query()]
        self._ring, self._specs, self._in_place = ring, specs, live is not None
        buckets = cut(specs, slot_nbytes)
        self.buckets: Final = len(buckets)
        self._rows = [[part.row for part in bucket] for bucket in buckets]
        self._left = Counter(row for bucket in self._rows for row in bucket)
        self._fresh: dict[int, Tensor] = {}
        self._begun: set[int] = set()
        self._addresses = np.zeros(len(specs), np.int64)
        self.buffer: Tensor | None = None
        if live is not None:
            for row, spec in enumerate(specs):
                if spec.name in live:
                    self._begun.add(row)
                    self._fresh[row], self._addresses[row] = live[spec.name], live[spec.name].data_ptr()
        else:
            placed, total = place(specs)
            self.buffer = _buffer(ring.device, total) if buffer is None else buffer
            if self.buffer.nbytes < total or self.buffer.device != ring.device:
                raise LocalError(f"the buffer has {self.buffer.nbytes} bytes on {self.buffer.device}, not {total}")
            self._offsets = [p.offset for p in placed]
            self._addresses[:] = np.array(self._offsets, np.int64) + self.buffer.data_ptr()
            self._flat: dict[str, Tensor] = {}
        self._side = Side(ring.device)
        self._side.after_current()
        parts = parts_of(specs, buckets, ring.address, slots, slot_nbytes, "target")
        with self._side.use():
            self._work = CudaWork(ring.device, len(specs), parts, "target", self._addresses)

    def drain(self, *buckets: int, seconds: float = 30.0) -> list[int]:
        """Read buckets that are filled, each once, and wait until they have been read; return the rows now whole.

        Raises:
            DeadlineExceeded: the GPU did not come to it; the memory in question is kept until it has.
        """
        for _ in self.reading(buckets, 1 << 62, seconds):
            pass
        return self.whole(buckets)

    def reading(
        self, buckets: Iterable[int], nbytes: int, seconds: float = 30.0, poll: float = _POLL_S
    ) -> Generator[int, None, None]:
        """`drain` in pieces of about `nbytes` at most: yield before each how many bytes it has. `whole` comes after.

        `poll`: seconds between questions whether the GPU has come to its end.

        Close it if it is not gone through: what was begun is waited for then.
        """
        if self._in_place:
            self._allocate(buckets)
        try:
            for bucket in buckets:
                pieces = self._work.pieces(bucket, self._addresses, nbytes)
                piece: int | None = 0
                while piece is not None:
                    # Not around the `yield`: the thread does something else there, on a stream of its own choice.
                    with self._side.use():
                        piece = next(pieces, None)
                    if piece is not None:
                        yield piece
        finally:
            self._side.settle(seconds, self, poll)

    def whole(self, buckets: Iterable[int]) -> list[int]:
        """Return the rows that have become whole by these buckets, which have been read."""
        whole = []
        for bucket in buckets:
            for row in self._rows[bucket]:
                self._left[row] -= 1
                if not self._left[row]:
                    whole.append(row)
        return whole

    def tensors(self, rows: Iterable[int]) -> list[tuple[TensorSpec, Tensor]]:
        """Return whole rows; in place, each once. Staged, they are views that keep the buffer alive."""
        return [(self._specs[row], self._fresh.pop(row) if self._in_place else self._view(row)) for row in rows]

    def digests(self) -> NDArray[np.uint64]:
        """Return the digest of every row, in order, once all buckets have been drained."""
        with self._side.use():
            return self._work.digests()

    def _allocate(self, buckets: Iterable[int]) -> None:
        made = False
        with _on(self._ring.device):
            for row in (row for bucket in buckets for row in self._rows[bucket]):
                if row not in self._begun:
                    spec = self._specs[row]
                    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._ring.device)
                    self._fresh[row], self._addresses[row], made = tensor, tensor.data_ptr(), True
                    self._begun.add(row)
        if made:
            # It may have been somebody's until a moment ago, whose reads of it are still queued on this stream.
            self._side.after_current()

    def _view(self, row: int) -> Tensor:
        spec, buffer = self._specs[row], self.buffer
        assert buffer is not None
        flat = self._flat.get(spec.dtype)
        if flat is None:
            element: torch.dtype = getattr(torch, spec.dtype)
            flat = self._flat[spec.dtype] = buffer[: buffer.nbytes // 8 * 8].view(element)
        count = spec.nbytes // flat.itemsize
        return flat.narrow(0, self._offsets[row] // flat.itemsize, count).view(spec.shape)


class Side:
    """A stream of Pitstop's own, one a device, or nothing where there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Have torch queue on it, and allocate for it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def after_current(self) -> None:
        """Have it go on when what is now queued on the current stream has been done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def fence(self) -> Fence:
        """Return the point that it has come to when all that is now queued has been done."""
        event: Fence = _Passed() if self._stream is None else self._stream.record_event()
        return event

    def settle(self, seconds: float, owner: object, poll: float = _POLL_S) -> None:
        """Wait until all that is now queued has been done.

        Raises:
            DeadlineExceeded: the GPU did not come to it; `owner`, and so its memory, is kept until it has.
        """
        _stuck[:] = [(fence, kept) for fence, kept in _stuck if not fence.query()]
        fence = self.fence()
        if not _passed(fence, seconds, poll):
            # What the GPU may still write to must not become somebody else's.
            _stuck.append((fence, owner))
            raise DeadlineExceeded(
                f"buckets were not read from the ring within {seconds:g} s",
                phase="receive", peer="device", seconds=seconds,
            )  # fmt: skip


@cache
def _stream(device: torch.device) -> Any:
    # torch has 32 and then begins anew: one a refit would soon be one that the model runs on.
    # Of the lowest priority there is, which is also that of the model's stream: what spares the model is the pace.
    return torch.cuda.Stream(device, priority=0)


class _Passed:
    def query(self) -> bool:
        return True


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


def _buffer(device: torch.device, nbytes: int) -> Tensor:
    with _on(device):
        return torch.empty(max(nbytes, 8), dtype=torch.uint8, device=device)


def _suits(ring: RingMemory, slots: int, slot_nbytes: int) -> None:
    if slots <= 0 or ring.nbytes < slots * slot_nbytes:
        raise LocalError(f"{slots} slots of {slot_nbytes} bytes do not fit into a ring of {ring.nbytes}")


def _passed(fence: Fence, seconds: float, poll: float = _POLL_S) -> bool:
    until = monotonic() + seconds
    while not fence.query():
        if monotonic() > until:
            return False
        # Spinning would take the GIL from the thread that serves.
        sleep(poll)
    return True
