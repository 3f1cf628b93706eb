"""What reached the parameters' loaders while a model loaded a version.

vLLM tells neither what it ignored nor what it lacks.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.worker_ports import TensorSpec

Loaded = Sequence[tuple["TensorSpec", "Tensor"]]


class Tally:
    """Counts over all calls in which a version is loaded."""

    def __init__(self) -> None:
        self._calls = 0
        self._starts: list[int] = []
        self._elements: dict[int, int] = {}
        self._seen: list[Any] = []  # keeps the ids in `_elements` from being used again
        # Kept with their memory: what is allocated there later would be taken for them.
        self._unused: list[tuple[TensorSpec, Tensor]] = []

    @property
    def unused(self) -> list[str]:
        """Tensors of which nothing has reached a loader."""
        return [spec.name for spec, _ in self._unused]

    def load(self, load_weights: Callable[[Iterable[tuple[str, Tensor]]], object], tensors: Loaded) -> None:
        """Have a model load tensors, and count."""
        followed: set[str] = set()
        self._starts = []
        with self._counted():
            load_weights(self._feed(tensors, followed))
        self._starts.sort()
        self._unused = [
            (spec, tensor)
            for spec, tensor in (*self._unused, *tensors)
            # What the reload leaves alone is loaded at once, past what is counted here.
            if spec.name not in followed and not self._inside(tensor) and not _left_alone(spec.name)
        ]

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        layerwise: Any = import_module("vllm.model_executor.model_loader.reload.layerwise")
        count = layerwise.get_numel_loaded

        def counting(loader: Any, arguments: Any) -> Any:
            self._calls += 1
            self._starts += [value.data_ptr() for value in arguments.arguments.values() if _is_content(value)]
            elements, result = count(loader, arguments)
            parameter = arguments.arguments.get("param")
            self._seen.append(parameter)
            self._elements[id(parameter)] = self._elements.get(id(parameter), 0) + elements
            return elements, result

        layerwise.get_numel_loaded = counting
        try:
            yield
        finally:
            layerwise.get_numel_loaded = count

    def _feed(self, tensors: Loaded, followed: set[str]) -> Iterator[tuple[str, Tensor]]:
        # Most models load each tensor before they ask for the next; one that collects them first passes views on.
        for spec, tensor in tensors:
            before = self._calls
            yield spec.name, tensor
            if self._calls > before:
                followed.add(spec.name)

    def _inside(self, tensor: Tensor) -> bool:
        first = bisect_left(self._starts, tensor.data_ptr())
        return first < len(self._starts) and self._starts[first] < tensor.data_ptr() + max(tensor.nbytes, 1)

    def short(self, layer: Module) -> list[str]:
        """Name the parameters of a layer that got fewer elements than a checkpoint has for them."""
        return [
            name
            for name, parameter in layer._parameters.items()
            if parameter is not None
            and name not in _NEVER_LOADED
            and self._elements.get(id(parameter), 0) < _wanted(layer, name, parameter)
        ]


_NEVER_LOADED = frozenset(
    {
        "_expert_map", "expert_mask", "expert_global_to_physical", "expert_physical_to_global",
        "expert_local_to_global", "e_score_correction_bias",
    }
)  # fmt: skip
"""What vLLM's reload leaves alone."""


def _left_alone(name: str) -> bool:
    return name.rpartition(".")[2] in _NEVER_LOADED


def _wanted(layer: Module, name: str, parameter: Any) -> int:
    rows = getattr(layer, "shard_indices", None)
    if rows is not None and name == "weight":
        # A vocabulary is padded up to what kernels like.
        return int(rows.num_org_elements) * int(parameter.numel() // max(parameter.shape[0], 1))
    return int(getattr(parameter, "weight_loader_numel", parameter.numel()))


def _is_content(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and not value.is_meta
