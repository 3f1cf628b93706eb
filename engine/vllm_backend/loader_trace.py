"""Where a model's own loader puts the tensors of a checkpoint: learned by watching it, without touching the model.

The loader runs on stand-ins: every parameter and buffer is replaced, for the time of the trace, by one on the meta
device that has its class, shape and loader but no memory, and so is every tensor of the checkpoint. What the loader
copies is then a pair of views, and what it computes shows as a copy out of memory that no checkpoint tensor owns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.worker_ports import TensorSpec

_LOOKED_UP: Final = frozenset(
    {
        "_expert_map", "expert_mask", "expert_global_to_physical", "expert_physical_to_global",
        "expert_local_to_global",
    }
)  # fmt: skip
"""Buffers that loaders read to find out what is theirs: without content they could not."""


_FILLS: Final = frozenset({"aten::fill_", "aten::zero_"})
"""What loaders pad a vocabulary with. A fill that undoes a copy is found out when the plan is proven."""


@dataclass(frozen=True, slots=True)
class View:
    """A view of some memory: offset, size and stride, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return this view of a tensor that starts where the memory does."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    @property
    def dense(self) -> bool:
        """Whether its elements lie one behind the other, in order."""
        step = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class Move:
    """A part of a checkpoint tensor, and the place that it is copied to in a parameter (or buffer)."""

    tensor: str
    source: View
    parameter: str
    target: View

    def whole(self, shape: tuple[int, ...]) -> bool:
        """Whether it takes all of a tensor of this shape, in order, to one piece of memory."""
        source = self.source
        return not source.offset and prod(source.size) == prod(shape) and source.dense and self.target.dense


@dataclass(frozen=True, slots=True)
class Fill:
    """A place in a parameter that a loader fills with a number, before or beside what it copies."""

    parameter: str
    target: View
    value: float


@dataclass(slots=True)
class Traced:
    """What a load does with each tensor. Parameters (and buffers) go by the first of their names.

    `lands` says which parameters a tensor reaches, in whatever way; `computed`, which get something else than copies,
    and what. `forms` are the parameters as a checkpoint is loaded into them; `aliases` lists all names of each.
    `passing` are those that the live model has no more: what became of them is elsewhere.
    """

    moves: dict[str, list[Move]]
    lands: dict[str, set[str]]
    computed: dict[str, str] = field(default_factory=dict)
    forms: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)
    fills: list[Fill] = field(default_factory=list)

    @property
    def first(self) -> dict[str, str]:
        """Return the first name of each parameter, by all of its names."""
        return {name: first for first, names in self.aliases.items() for name in names}


def trace(model: Any, specs: Sequence[TensorSpec]) -> Traced:
    """Have `model.load_weights` load tensors of these specs, and return what it did with them.

    Nothing may run the model meanwhile. Raises whatever the loader raises when it looks for content.
    """
    import torch

    sources = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs}
    traced = Traced({spec.name: [] for spec in specs}, {spec.name: set() for spec in specs})
    with _stand_ins(model, traced), torch.no_grad():
        watch = _Watch(traced, sources)
        with watch:
            model.load_weights((name, tensor) for name, tensor in sources.items())
        for name, form in _current(model, traced):
            watch.still_there(name, form)
    return traced


class _Watch(TorchDispatchMode):
    """Writes down every copy out of a source into a stand-in, and everything else that changes a stand-in."""

    def __init__(self, traced: Traced, sources: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traced = traced
        self._sources = {_memory(tensor): name for name, tensor in sources.items()}
        self._types = {name: tensor.dtype for name, tensor in sources.items()}
        self._origins = {memory: frozenset({name}) for memory, name in self._sources.items()}
        self._memory = {name: _memory(form) for name, form in traced.forms.items()}
        self._targets = {memory: name for name, memory in self._memory.items()}
        self._seen: list[Tensor] = []  # or their memory would be used again, and taken for theirs

    def still_there(self, name: str, form: Tensor) -> None:
        """Look whether a parameter is what it was before the load."""
        if _memory(form) != self._memory[name]:
            self._traced.computed[name] = "is replaced while it loads"
            for source in self._origins_of(form):
                self._traced.lands[source].add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        result = func(*args, **(kwargs or {}))
        origins = self._origins_of((args, kwargs))
        written = _written(func, args, kwargs or {})
        for made in (*_tensors(result), *written):
            self._follow(made, origins)
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        elif func._schema.name in _FILLS and not self._origins_of(args[1:]):
            self._filled(args[0], args[1] if len(args) > 1 else 0)
        else:
            for value in written:
                self._changed(value, origins, f"is changed by {func._schema.name}")
        for value in written:
            # What is copied out of a tensor after a loader has written to it is not what a version brings.
            self._sources.pop(_memory(value), None)
        return result

    def _follow(self, made: Tensor, origins: frozenset[str]) -> None:
        memory = _memory(made)
        if origins and memory not in self._origins:
            self._seen.append(made)
        if origins:
            self._origins[memory] = self._origins.get(memory, frozenset()) | origins

    def _origins_of(self, values: Any) -> frozenset[str]:
        none: frozenset[str] = frozenset()
        return none.union(*(self._origins.get(_memory(value), none) for value in _tensors(values)))

    def _copied(self, target: Tensor, source: Tensor) -> None:
        origins = self._origins_of(source)
        name, parameter = self._sources.get(_memory(source)), self._targets.get(_memory(target))
        if name is None or parameter is None:
            self._changed(target, origins, "gets what is computed from the checkpoint")
        elif target.shape != source.shape:
            self._changed(target, origins, f"gets {list(source.shape)} spread over {list(target.shape)}")
        elif source.dtype != self._types[name] or target.dtype != self._traced.forms[parameter].dtype:
            self._changed(target, origins, "is loaded as another type than it has")
        else:
            self._traced.moves[name].append(Move(name, _view(source), parameter, _view(target)))
            self._traced.lands[name].add(parameter)

    def _filled(self, target: Tensor, value: Any) -> None:
        if (parameter := self._targets.get(_memory(target))) is not None and target.numel():
            self._traced.fills.append(Fill(parameter, _view(target), float(value)))

    def _changed(self, target: Tensor, origins: frozenset[str], how: str) -> None:
        if (parameter := self._targets.get(_memory(target))) is not None:
            self._traced.computed[parameter] = how
            for name in origins:
                self._traced.lands[name].add(parameter)


@contextlib.contextmanager
def _stand_ins(model: Module, traced: Traced) -> Iterator[None]:
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, tuple[str, Tensor]] = {}
    try:
        for prefix, layer in model.named_modules():
            for held in (layer._parameters, layer._buffers):
                kept.append((held, dict(held)))
                for name, value in kept[-1][1].items():
                    if value is None or name in _LOOKED_UP:
                        continue
                    full = f"{prefix}.{name}" if prefix else name
                    if id(value) not in made:
                        made[id(value)] = full, _stand_in(layer, name, value)
                        traced.forms[full] = made[id(value)][1]
                    first, held[name] = made[id(value)]
                    traced.aliases.setdefault(first, []).append(full)
            for held, forms in zip((layer._parameters, layer._buffers), _restorable(layer), strict=True):
                for name in forms.keys() - layer._parameters.keys() - layer._buffers.keys():
                    full = f"{prefix}.{name}" if prefix else name
                    held[name] = traced.forms[full] = _stand_in(layer, name, None)
                    traced.aliases[full] = [full]
                    traced.passing.add(full)
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.update(before)


def _stand_in(layer: Module, name: str, value: Any) -> Tensor:
    import torch
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    # As the checkpoint is loaded into it; what post-load work made of it may have another shape and no loader.
    parameters, buffers = _restorable(layer)
    form: Any = parameters.get(name, buffers.get(name, value))
    bare = torch.empty_strided(form.size(), form.stride(), dtype=form.dtype, device="meta")
    bare.__class__ = form.__class__
    bare.__dict__ = form.__dict__.copy()
    stand_in: Tensor = restore_layer_refs(bare, layer)
    return stand_in


def _restorable(layer: Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what vLLM's reload would put back: parameters and buffers as they were before anything was loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, buffers = get_layerwise_info(layer).restore_metadata
    return parameters, buffers


def _current(model: Module, traced: Traced) -> Iterator[tuple[str, Tensor]]:
    for prefix, layer in model.named_modules():
        for held in (layer._parameters, layer._buffers):
            for name, value in held.items():
                full = f"{prefix}.{name}" if prefix else name
                if value is not None and full in traced.forms:
                    yield full, value


def _tensors(values: Any) -> list[Tensor]:
    import torch

    # A model's loader has tens of thousands of operations, and torch's own walk takes longer than each of them.
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return what an operation writes to."""
    if not func._schema.is_mutable:
        return []
    return [
        value
        for n, told in enumerate(func._schema.arguments)
        if told.alias_info is not None and told.alias_info.is_write
        for value in _tensors(args[n] if n < len(args) else kwargs.get(told.name))
    ]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
