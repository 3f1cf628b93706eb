"""The digest's definition (see `digest`) in torch's operations, on any device: correct, and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from pitstop.transports.digest import BLOCK, STEP

if TYPE_CHECKING:
    from torch import Tensor

PIECE: Final = 1 << 20
"""Words at once: each takes some thirty bytes while it is worked on."""


def add_digest(content: Tensor, itemsize: int, start: int, total: Tensor, lanes: Tensor) -> None:
    """Add the digest of packed bytes to the int64 tensor `total`; `start` is the index of the first element."""
    width = min(itemsize, 2)
    first = start * (itemsize // width)
    for low in range(0, content.numel() // width, PIECE):
        piece = content[low * width : (low + PIECE) * width]
        # Not a view of another dtype: a source may begin at any byte.
        words = piece.to(torch.int64) if width == 1 else piece[::2].to(torch.int64) | piece[1::2].to(torch.int64) << 8
        block, lane = divmod(first + low, BLOCK)
        blocks = -(-(lane + words.numel()) // BLOCK)
        padded = torch.nn.functional.pad(words, (lane, blocks * BLOCK - lane - words.numel())).view(blocks, BLOCK)
        sums = (padded * lanes).sum(1) * _odd_words(block + BLOCK + 1, blocks, content.device)
        total += sums.sum() + _signed(STEP * words.numel())


def _odd_words(first: int, count: int, device: torch.device) -> Tensor:
    z = (torch.arange(count, dtype=torch.int64, device=device) + first) * _signed(STEP)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    # torch shifts the sign in.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number
