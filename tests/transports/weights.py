"""A small model's weights, different for every version."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pitstop.engine.worker_ports import Inventory, TensorSpec
from pitstop.transports.sources import TensorSource

if TYPE_CHECKING:
    from torch import Tensor


def weights(version: int) -> dict[str, Tensor]:
    import torch

    made = torch.Generator().manual_seed(version)
    return {
        "embed.weight": torch.randn(301, 64, generator=made).to(torch.bfloat16),
        "layer.weight": torch.randn(64, 65, generator=made).to(torch.bfloat16),
        "layer.bias": torch.randn(65, generator=made),
        "layer.scale": torch.randn((), generator=made),
        "layer.empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "router.bias": torch.randn(256, generator=made, dtype=torch.float64),
        "steps": torch.randint(1 << 40, (3,), generator=made),
        "codes": torch.randint(256, (1001,), generator=made, dtype=torch.uint8),
    }


def inventory(tensors: dict[str, Tensor]) -> Inventory:
    return Inventory(
        tuple(TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items())
    )


class Slow(TensorSource):
    """Takes half a minute to read, looking up often, as any source does."""

    begun: Callable[[], None]

    def pack(self, *arguments: Any) -> Iterator[int]:
        self.begun()
        for _ in range(600):
            time.sleep(0.05)
            yield 0
        yield from super().pack(*arguments)


def slow(begun: Callable[[], None]) -> Slow:
    source = Slow(weights(1).items())
    source.begun = begun
    return source
