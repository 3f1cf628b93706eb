"""Numbers for the content of tensors, by which two are compared without keeping either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK: Final = 1 << 22  # words of eight bytes: bounds the memory that indices and products take
_ODD: Final = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed integer


def sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a 64-bit number for each tensor's content, in order, shape and dtype aside. Waits for the device once."""
    import torch

    if not tensors:
        return []
    found = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for part in word_sums(tensor.detach().contiguous().view(-1), _CHUNK):
            total += part
        found.append(total)
    return [int(number) for number in torch.stack(found).tolist()]


def constant(tensors: Sequence[Tensor]) -> list[bool]:
    """Say of each tensor whether all its elements are the same. Waits for the device once."""
    import torch

    if not tensors:
        return []
    flat = [(tensor == tensor.flatten()[:1]).all() if tensor.numel() else torch.tensor(True) for tensor in tensors]
    return [bool(one) for one in torch.stack([answer.to(tensors[0].device) for answer in flat]).tolist()]


def word_sums(flat: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yield what each `chunk` words of a flat tensor add to a sum modulo 2^64, on its device, one after the other.

    The sum is of eight-byte words, each folded and times its index: order matters.
    """
    import torch

    if not flat.numel():
        return
    flat = flat.view(torch.uint8)
    for start in range(0, flat.numel(), 8 * chunk):
        part = flat[start : start + 8 * chunk]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8)).clone()
        words = part.view(torch.int64)
        index = torch.arange(start // 8, start // 8 + words.numel(), dtype=torch.int64, device=words.device)
        mixed = (words ^ (words >> 29)) * (index * 2 + 1)
        yield ((mixed ^ (mixed >> 32)) * _ODD).sum()
