"""Modules with the names and attributes that PEFT gives to what it wraps, so that tests need no PEFT.

What each computes is its `forward`, which knows nothing of merging: the reference that merges are held against.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

ROOT = "base_model.model."


class Conv1D(nn.Module):
    """GPT-2's layer: its weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Tuned(nn.Module):
    """A layer with low-rank pairs beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self.lora_magnitude_vector = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.use_dora: dict[str, bool] = {}
        self.lora_bias: dict[str, bool] = {}
        self.lora_variant: dict[str, object] = {}
        self.merged_adapters: list[str] = []
        self.fan_in_fan_out = isinstance(base, Conv1D)
        self.disable_adapters = False

    def add(self, name: str, rank: int, alpha: float, *, rslora: bool = False) -> None:
        base: Any = self.base_layer
        rows, columns = base.weight.shape[::-1] if self.fan_in_fan_out else base.weight.shape
        if isinstance(base, nn.Embedding):
            self.lora_embedding_A[name] = nn.Parameter(torch.randn(rank, rows))
            self.lora_embedding_B[name] = nn.Parameter(torch.randn(columns, rank))
        else:
            self.lora_A[name] = nn.Linear(columns, rank, bias=False)
            self.lora_B[name] = nn.Linear(rank, rows, bias=False)
        self.scaling[name] = alpha / (math.sqrt(rank) if rslora else rank)

    def forward(self, x: Tensor, adapter: str = "default") -> Tensor:
        y: Tensor = self.base_layer(x)
        if isinstance(self.base_layer, nn.Embedding):
            added: Tensor = self.lora_embedding_A[adapter].T[x] @ self.lora_embedding_B[adapter].T
        else:
            down: Any = self.lora_A[adapter]
            added = self.lora_B[adapter](down(x.to(down.weight.dtype)))
        return y + self.scaling[adapter] * added


class Saved(nn.Module):
    """A layer that is trained whole, beside the one that it came from."""

    def __init__(self, layer: nn.Linear, *names: str) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict(
            {
                name: nn.Linear(layer.in_features, layer.out_features, bias=False).to(layer.weight.dtype)
                for name in names
            }
        )


class Wrapped(nn.Module):
    """The outermost module: puts `base_model.model` before every name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


class Small(nn.Module):
    """An embedding, a linear layer with a bias, a Conv1D, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.proj = nn.Linear(16, 24)
        self.conv = Conv1D(24, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 37, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.conv(torch.relu(self.proj(self.embed(words))))))
        return logits


def tuned(*adapters: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Wrapped:
    """Return a small model in which all but the norm is trained by every adapter."""
    torch.manual_seed(seed)
    model: Any = Small()
    model.to(dtype)
    for place in ("embed", "proj", "conv"):
        layer = Tuned(getattr(model, place))
        for name in adapters or ("default",):
            layer.add(name, 4, 8.0, rslora=place == "proj")
        setattr(model, place, layer)
    model.head = Saved(model.head, *(adapters or ("default",)))
    return Wrapped(model)
