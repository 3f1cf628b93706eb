"""Merging an adapter into tensors as they are sent, and proving each merge. The trainer's model is not touched.

The sum is taken in float64 and rounded once, so that it depends neither on the device nor on how it is cut, nor on a
matmul precision that somebody has turned down.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import MergeUnproven, OfferRejected
from pitstop.transports.adapters import Delta, Part
from pitstop.transports.packing import Slot
from pitstop.transports.tensor_source import TensorSource

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pitstop.transports.segment import Mapping as Segment

_ELEMENTS: Final = 1 << 21
_SLACK: Final = 1e-9  # of what float64 sums, against the 1e-16 that it rounds by


class MergedSource(TensorSource):
    """Tensors of this process, some with an adapter to be merged into them: one at a time, as it is read.

    Its tensors go through memory of the host, also from a GPU: what is merged lies nowhere for long.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__((part.name, part.tensor) for part in parts)
        self.device = ""
        self._deltas: Final = {n: part.delta for n, part in enumerate(parts) if part.delta is not None}
        self._merged: tuple[int, Tensor] | None = None

    def tensors(self) -> Iterator[Any]:
        """Yield the tensors, merged."""
        for index, (spec, tensor) in enumerate(super().tensors()):
            delta = self._deltas.get(index)
            yield spec, tensor if delta is None else merge(spec.name, tensor, delta)

    def pack(self, slots: Sequence[Slot], into: Segment, digests: NDArray[np.uint64]) -> Iterator[int]:
        """See `Source.pack`.

        Raises:
            MergeUnproven: what came out of a merge is not what the adapter adds; names the tensor.
        """
        import numpy as np

        as_they_are = [row for row, slot in enumerate(slots) if slot.index not in self._deltas]
        found = np.zeros(len(as_they_are), np.uint64)
        yield from super().pack([slots[row] for row in as_they_are], into, found)
        digests[as_they_are] = found
        for row, slot in enumerate(slots):
            if slot.index in self._deltas:
                digests[row] = yield from self._one(slot, into)

    def lendable(self, rows: Sequence[Slot]) -> tuple[list[Tensor], list[Any]]:
        """Refuse: what is to be sent is not in any tensor yet."""
        raise OfferRejected("an adapter that is merged as it is sent cannot be read from a GPU's memory")

    def _one(self, slot: Slot, into: Segment) -> Generator[int, None, int]:
        import numpy as np

        tensor = yield from self._made(slot.index)
        digest = np.zeros(1, np.uint64)
        yield from TensorSource([(self._specs[slot.index].name, tensor)]).pack([replace(slot, index=0)], into, digest)
        return int(digest[0])

    def _made(self, index: int) -> Generator[int, None, Tensor]:
        # The one of the last call again: parts of one tensor come one after the other.
        if self._merged is None or self._merged[0] != index:
            self._merged = None
            self.wait_for_what_was_queued()
            tensor = yield from merging(self._specs[index].name, self._tensors[index], self._deltas[index])
            self._merged = index, tensor
        return self._merged[1]


def merge(name: str, tensor: Tensor, delta: Delta) -> Tensor:
    """Return a tensor with what an adapter adds to it, in memory of its own. See `merging`."""
    steps = merging(name, tensor, delta)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            made: Tensor = done.value
            return made


def merging(name: str, tensor: Tensor, delta: Delta) -> Generator[int, None, Tensor]:
    """`merge`, in steps of a few milliseconds.

    The proof, block by block: for a probe vector x, what the merge changed times x is what the adapter makes of x, but
    for what the rounding of a row to its dtype can add up to.

    Raises:
        MergeUnproven: it is not, or a value is not finite.
    """
    import torch

    with torch.no_grad():
        up, down = _factors(delta, tensor.device)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        probe = torch.randn(tensor.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        probe = probe.to(tensor.device)
        adds = up @ (down @ probe)
        slack = _SLACK * (up.abs() @ (down.abs() @ probe.abs()))
    rows = max(1, _ELEMENTS // max(1, tensor.shape[1]))
    for low in range(0, tensor.shape[0], rows):
        part = slice(low, low + rows)
        with torch.no_grad():
            had = tensor[part].double()
            made[part] = add(had, up[part], down)
            why = _wrong(had, made[part], probe, adds[part], slack[part])
        if why:
            raise MergeUnproven(f"{name}, with its adapter: {why}", tensor=name)
        yield 0
    return made


def add(had: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the sum, in the dtype of all three."""
    import torch

    return torch.addmm(had, up, down)


def _factors(delta: Delta, device: Any) -> tuple[Tensor, Tensor]:
    import torch

    up = delta.up.detach().to(device, torch.float64)
    down = delta.down.detach().to(device, torch.float64)
    up, down = (down.T, up.T) if delta.transposed else (up, down)
    return up * delta.scaling, down


def _wrong(had: Tensor, made: Tensor, probe: Tensor, adds: Tensor, slack: Tensor) -> str:
    import torch

    now = made.double()
    if not bool(torch.isfinite(now).all()):
        return "it has values that are not finite"
    limits = torch.finfo(made.dtype)
    rounding = limits.eps * (now.abs() @ probe.abs()) + limits.smallest_normal * limits.eps * probe.abs().sum()
    off = ((now - had) @ probe - adds).abs()
    excess = off - rounding - slack
    worst = int(excess.argmax())
    if float(excess[worst]) <= 0:
        return ""
    return f"its merge is not what the adapter computes: off by {off[worst]:.3g}, and rounding is {rounding[worst]:.3g}"
