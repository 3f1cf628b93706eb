"""What the live model's memory holds, as one number a tensor: to compare two engines, or one engine with itself.

It is about the engine's own layout (fused, sharded, converted), so a trainer cannot predict it. Two engines of one
configuration that hold the same weights agree; a weight that drifted or was never written shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.vllm_backend.drafter import DraftModel

_CHUNK = 1 << 24  # elements of eight bytes: bounds the memory that indices and products take
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed integer


def fingerprint(model: Module | DraftModel) -> dict[str, str]:
    """Return a 64-bit number for each parameter and buffer, computed where it lies."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: f"{_number(tensor) & (2**64 - 1):016x}" for name, tensor in named}


def _number(tensor: Tensor) -> int:
    """Sum modulo 2^64 over eight-byte words of a product of the word, folded, and its index: order matters."""
    import torch

    if not tensor.numel():
        return 0
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    words = flat.view(torch.int64)
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        mixed = (part ^ (part >> 29)) * (index * 2 + 1)
        mixed = (mixed ^ (mixed >> 32)) * _ODD
        total += int(mixed.sum().item())
    return total
