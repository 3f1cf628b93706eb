"""What reached the parameters' loaders while a model loaded a version.

vLLM tells neither what it ignored nor what it lacks.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pitstop.engine.vllm_backend.layers import NEVER_LOADED, wanted

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.worker_ports import TensorSpec

Loaded = Sequence[tuple["TensorSpec", "Tensor"]]


class Tally:
    """Counts over all calls in which a version is loaded into `model`."""

    def __init__(self, model: Module | None = None) -> None:
        self._left_alone = [] if model is None else _left_alone(model)
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
            if spec.name not in followed and not self._inside(tensor)
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
            with contextlib.ExitStack() as restored:
                for parameter in self._left_alone:
                    restored.enter_context(self._followed(parameter))
                yield
        finally:
            layerwise.get_numel_loaded = count

    @contextlib.contextmanager
    def _followed(self, parameter: Any) -> Iterator[None]:
        """Count what is loaded into a parameter that vLLM's reload leaves in its place, unwrapped."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        own = parameter.__dict__.get("weight_loader")
        loader = own or default_weight_loader

        def counting(into: Any, content: Tensor, *more: Any, **named: Any) -> Any:
            self._calls += 1
            self._starts.append(content.data_ptr())
            return loader(into, content, *more, **named)

        parameter.weight_loader = counting
        try:
            yield
        finally:
            del parameter.weight_loader
            if own is not None:
                parameter.weight_loader = own

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
            and name not in NEVER_LOADED
            and self._elements.get(id(parameter), 0) < wanted(layer, name, parameter)
        ]


def _left_alone(model: Module) -> list[Any]:
    found = {
        id(parameter): parameter
        for layer in model.modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None and name in NEVER_LOADED
    }
    return list(found.values())


def _is_content(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and not value.is_meta
