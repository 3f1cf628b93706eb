"""A number for each of many tensors, by which two of them are compared without keeping either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK: Final = 1 << 24  # elements: bounds the memory that indices and products take
_ODD: Final = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed integer


def sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a 64-bit number for each tensor's content, in order, shape and dtype aside. Waits for the device once."""
    import torch

    if not tensors:
        return []
    return [int(number) for number in torch.stack([_sum(tensor) for tensor in tensors]).tolist()]


def constant(tensors: Sequence[Tensor]) -> list[bool]:
    """Say of each tensor whether all its elements are the same. Waits for the device once."""
    import torch

    if not tensors:
        return []
    flat = [(tensor == tensor.flatten()[:1]).all() if tensor.numel() else torch.tensor(True) for tensor in tensors]
    return [bool(one) for one in torch.stack([answer.to(tensors[0].device) for answer in flat]).tolist()]


def _sum(tensor: Tensor) -> Tensor:
    """Sum over elements a product of the bits, folded, and of an index: order matters."""
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(whole)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=tensor.device)
        mixed = (part + 1) * (index * 2 + 1)
        mixed = (mixed ^ (mixed >> 29)) * _ODD
        total += (mixed ^ (mixed >> 32)).sum()
    return total
