"""Where tensors lie in a buffer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pitstop.engine.worker_ports import Placed, TensorSpec

ALIGNMENT: Final = 512
"""Every tensor starts at a multiple of this many bytes: what any copy engine and any dtype's view asks for."""


def place(specs: Iterable[TensorSpec]) -> tuple[tuple[Placed, ...], int]:
    """Lay tensors out in order; return their places and the size of the buffer in bytes."""
    placed, offset = [], 0
    for spec in specs:
        placed.append(Placed(spec, offset))
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed), offset
