"""A trainer's way through a ring: bucket after bucket, as slots come free. No sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pitstop.engine.errors import OfferRejected, ProtocolViolation
from pitstop.engine.worker_ports import TensorSpec
from pitstop.transports.aside import aside
from pitstop.transports.buckets import ALIGNMENT, cut
from pitstop.transports.deadline import BEAT_S
from pitstop.transports.packing import Slot, Source, row_of

if TYPE_CHECKING:
    from pitstop.transports.cuda_memory import LentRing
    from pitstop.transports.segment import Mapping

_AHEAD: Final = 2  # buckets that are being written on a GPU at the same time
_LOOK_S: Final = 0.05


class Geometry:
    """What both ends of a ring derive from the same rows: which part lies where in which bucket.

    Raises:
        ProtocolViolation: a ring that cannot be.
    """

    def __init__(self, specs: Sequence[TensorSpec], rows: Sequence[Slot], slots: int, slot_nbytes: int) -> None:
        if slots < 1 or slot_nbytes < ALIGNMENT or slot_nbytes % ALIGNMENT:
            raise ProtocolViolation(f"the engine asks for a ring of {slots} slots of {slot_nbytes} bytes")
        self.slots: Final = slots
        self.slot_nbytes: Final = slot_nbytes
        self.rows: Final = rows
        self.specs: Final = [row_of(specs, row) for row in rows]
        self.buckets: Final = cut(self.specs, slot_nbytes)

    def slot(self, bucket: int) -> int:
        """Return the byte at which a bucket's slot begins."""
        return bucket % self.slots * self.slot_nbytes


def pour(
    source: Source,
    geometry: Geometry,
    into: Mapping,
    drained: Callable[[], int],
    filled: Callable[[int], None],
    digests: list[int],
) -> Iterator[float]:
    """Write every bucket, telling `filled`; yield how many seconds may be waited: 0.0, or more where no slot is free.

    `digests` holds every row's when it has ended.
    """
    import numpy as np

    total = np.zeros(len(geometry.rows), np.uint64)
    for n, bucket in enumerate(geometry.buckets):
        while n - drained() >= geometry.slots:
            yield BEAT_S
        at, rows = geometry.slot(n), geometry.rows
        parts = [replace(rows[p.row], offset=at + p.offset, start=p.start, count=p.count) for p in bucket]
        sums = np.zeros(len(parts), np.uint64)
        for _ in source.pack(parts, into, sums):
            yield 0.0
        np.add.at(total, [p.row for p in bucket], sums)
        filled(n + 1)
    digests[:] = total.tolist()


def prepare_lent(device: str) -> None:
    """Have the kernels of a GPU compiled, named as an offer names it."""
    from pitstop.transports import cuda_memory, digest_cuda

    digest_cuda.prepare(cuda_memory.device_of(device))


def pour_lent(
    source: Source,
    geometry: Geometry,
    ring: LentRing,
    drained: Callable[[], int],
    filled: Callable[[int], None],
    digests: list[int],
) -> Iterator[float]:
    """`pour`, on a GPU: nothing is said to be written before the GPU has written it.

    Raises:
        OfferRejected: the source is not on a GPU.
    """
    from pitstop.transports.cuda_ring import Fence, Pourer
    from pitstop.transports.tensor_source import TensorSource

    if not isinstance(source, TensorSource):
        raise OfferRejected("the engine wants the weights from a GPU, and the source has none there")
    tensors, ready = source.lendable(geometry.rows)
    # Aside: where its kernels are compiled only now, that takes longer than the engine bears silence.
    making = aside(lambda: Pourer(tensors, geometry.specs, ring, geometry.slots, geometry.slot_nbytes, ready))
    while not making.done():
        wait((making,), timeout=_LOOK_S)
        yield 0.0
    pourer = making.result()
    underway: deque[Fence] = deque()
    begun = done = 0
    while done < pourer.buckets:
        if begun < pourer.buckets and len(underway) < _AHEAD and begun - drained() < geometry.slots:
            underway.append(pourer.pour(begun))
            begun += 1
        elif not underway:
            yield BEAT_S
        elif pourer.wait(underway[0], _LOOK_S):
            underway.popleft()
            done += 1
            filled(done)
            yield 0.0
        else:
            yield 0.0
    digests[:] = pourer.digests().tolist()
