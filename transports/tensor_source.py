"""Tensors of this process as a source: read where they are, on any device, of any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import OfferRejected
from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec
from pitstop.transports.digest import CALL_BYTES, COPY, NARROW, Work
from pitstop.transports.packing import Checks, Slot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pitstop.transports.segment import Mapping as Segment


class TensorSource:
    """Tensors of this process, on any device, of any layout.

    They are referred to, not copied: what they hold when `pack` reads them is what is sent. Work queued on the
    current CUDA stream when the source is made is waited for; later work is not.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        import torch

        known = {getattr(torch, name): name for name in ITEMSIZE}
        pairs = list(named)
        self._tensors: Final = [_plain(name, value, known) for name, value in pairs]
        self._specs: Final = tuple(
            TensorSpec(str(name), known[t.dtype], tuple(t.shape))
            for (name, _), t in zip(pairs, self._tensors, strict=True)
        )
        self._ready = _recorded(self._tensors)
        self._flattened: tuple[int, Tensor] | None = None
        self.device = _device(self._tensors)  #: see `sources.device_of`

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return what there is, in order."""
        return self._specs

    def tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yield the tensors."""
        yield from zip(self._specs, self._tensors, strict=True)

    def pack(self, slots: Sequence[Slot], into: Segment, digests: NDArray[np.uint64]) -> Iterator[int]:
        """See `Source.pack`. Copies and the cast from float32 to bfloat16 run in our kernels, the rest in torch."""
        import numpy as np

        direct: dict[int, list[tuple[int, ...]]] = {COPY: [], NARROW: []}
        others = []
        for row, slot in enumerate(slots):
            tensor, has = self._tensors[slot.index], self._specs[slot.index].dtype
            kind = _direct(tensor, has, slot.dtype)
            if kind is None:
                others.append((row, slot, tensor))
            else:
                there, width = into.address + slot.offset, ITEMSIZE[has]
                here = tensor.data_ptr() + (slot.base + slot.start) * width
                count = tensor.numel() if slot.count is None else slot.count
                direct[kind].append((row, width, here, there, count, slot.start))
        for kind, rows in direct.items():
            if rows:
                row_at, itemsize, source, target, counts, start = np.array(rows, np.uint64).T.copy()
                work = Work(
                    kind, itemsize.astype(np.int64), source, target, counts.astype(np.int64), start.astype(np.int64)
                )
                yield from work
                digests[row_at.astype(np.int64)] = work.digests
        yield from self._by_torch(others, into, digests)

    def lendable(self, rows: Sequence[Slot]) -> tuple[list[Tensor], list[Any]]:
        """Return what rows are made of, on its GPU, and the events after which it may be read."""
        tensors = (self._tensors[row.index] for row in rows)
        parts = [t if r.count is None else _part(t, r.base, r.count) for t, r in zip(tensors, rows, strict=True)]
        return parts, [event for _, event in self._ready]

    def wait_for_what_was_queued(self) -> None:
        """Have the current streams of this thread wait for what was queued on the tensors' when the source was made."""
        if not self._ready:
            return
        import torch

        for device, event in self._ready:
            torch.cuda.current_stream(device).wait_event(event)

    def close(self) -> None:
        """Do nothing: whoever made the source drops it, and the tensors with it."""

    def _by_torch(
        self, others: Sequence[tuple[int, Slot, Tensor]], into: Segment, digests: NDArray[np.uint64]
    ) -> Iterator[int]:
        if not others:
            return
        self.wait_for_what_was_queued()
        checks = Checks(digests)
        for row, slot, tensor in others:
            digests[row] = 0
            width, start, part = ITEMSIZE[slot.dtype], slot.start, tensor
            if slot.count is not None:
                part = self._flat(slot.index)[slot.base + start : slot.base + start + slot.count]
            target = into.tensor(slot.dtype, tuple(part.shape), slot.offset)
            for there, here in _slices(target, part):
                there.copy_(here)
                yield 0
                yield from checks.add(row, there.data_ptr(), width, there.numel(), start)
                start += there.numel()
        yield from checks.flush()

    def _flat(self, index: int) -> Tensor:
        # The one of the last call again: a tensor that has to be copied for it is copied once, not once a part.
        if self._flattened is None or self._flattened[0] != index:
            self._flattened = index, self._tensors[index].reshape(-1)
        return self._flattened[1]


def spread(value: Any) -> bool:
    """Say whether a tensor is a DTensor, of which this rank holds a part."""
    return hasattr(value, "full_tensor") and hasattr(value, "device_mesh")


def _plain(name: str, value: Any, known: Mapping[Any, str]) -> Tensor:
    """Return what to read; raise `OfferRejected`, naming the tensor, if it cannot be sent."""
    import torch

    why = None
    if not isinstance(value, torch.Tensor):
        why = f"is a {type(value).__name__}, not a tensor"
    elif type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "full_tensor"):
        why = "is spread over ranks: publish its full_tensor()"
    elif value.is_meta:
        why = "is on the meta device and has no content"
    elif value.layout != torch.strided:
        why = f"has the layout {value.layout}"
    elif value.dtype not in known:
        why = f"has the dtype {value.dtype}"
    elif value.is_cpu and not value.data_ptr() and value.numel():
        why = f"is a {type(value).__name__} without memory of its own"
    if why is not None:
        raise OfferRejected(f"{name} {why}", tensor=str(name))
    plain: Tensor = value.detach() if value.requires_grad else value
    return plain


def _direct(tensor: Tensor, has: str, wanted: str) -> int | None:
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
        return None
    if has == wanted:
        return COPY
    return NARROW if (has, wanted) == ("float32", "bfloat16") else None


def _part(tensor: Tensor, base: int, count: int) -> Tensor:
    """Return `count` elements from the flat element `base` on, as a view wherever they are whole slices."""
    while tensor.numel() and tensor.dim():
        each = tensor.numel() // tensor.shape[0]
        if base % each == 0 and count % each == 0:
            return tensor.narrow(0, base // each, count // each)
        if base // each != (base + count - 1) // each:
            break
        tensor, base = tensor[base // each], base % each
    return tensor.reshape(-1)[base : base + count]


def _slices(target: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut along the first dimension that is longer than one, so that no copy takes long."""
    nbytes = max(target.nbytes, tensor.nbytes)
    dim = next((d for d, length in enumerate(tensor.shape) if length > 1), None)
    if dim is None or nbytes <= CALL_BYTES:
        yield target, tensor
        return
    step = max(1, tensor.shape[dim] * CALL_BYTES // nbytes)
    for low in range(0, tensor.shape[dim], step):
        length = min(step, tensor.shape[dim] - low)
        yield target.narrow(dim, low, length), tensor.narrow(dim, low, length)


def _device(tensors: Sequence[Tensor]) -> str:
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    if device is None or device.type != "cuda":
        return ""
    from pitstop.transports.cuda_memory import device_id

    return device_id(device)


def _recorded(tensors: Iterable[Tensor]) -> list[tuple[Any, Any]]:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if not devices:
        return []
    import torch

    return [(device, torch.cuda.current_stream(device).record_event()) for device in devices]
