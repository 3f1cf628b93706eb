"""A small model's weights, different for every version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pitstop.engine.worker_ports import Inventory, TensorSpec

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
