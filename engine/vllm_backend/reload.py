"""vLLM's layer-by-layer reload, made safe: complete or refused, undone when it failed, free of the sender's memory.

vLLM moves a model's parameters to the meta device, collects what is loaded into each layer, and copies a layer into its
old storage when it is whole. It does not mind what is missing (a layer keeps its old weights, or gets memory that
nobody wrote), keeps references to what it was given, and leaves the model unusable when it fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pitstop.engine.errors import MissingTensors, UnexpectedTensors, names
from pitstop.engine.vllm_backend.layers import is_attention
from pitstop.engine.vllm_backend.tally import Tally
from pitstop.engine.worker_ports import Ways

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    from pitstop.engine.worker_ports import TensorSpec


@dataclass(slots=True)
class Reload:
    """Implements `Loading` by vLLM's reload of one model, or of some `layers` of it.

    `config` is vLLM's; `whole` says that this rank's model uses every tensor; `why` is the reason that there is no
    load plan.
    """

    model: Module
    config: Any
    device: Any
    whole: bool
    layers: tuple[Module, ...] | None = None
    why: str = ""
    _fed: int = 0
    _tally: Tally = field(default_factory=Tally)
    _unloaded: list[Module] = field(default_factory=list)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        import torch
        from vllm.config import set_current_vllm_config

        # Loaders look the configuration up, and new tensors have to appear on the worker's device. Both devices are
        # a thread's own: a receiver's thread has neither until it is told.
        current: Any = contextlib.nullcontext()
        if self.device.type != "cpu":
            current = torch.get_device_module(self.device).device(self.device)
        with set_current_vllm_config(self.config), current, self.device:
            yield

    def begin(self) -> None:
        """Open the model: from here on it is torn."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # What a refit left that failed and was not undone: vLLM would take its layers for prepared.
        self.undo()
        self._tally, self._fed = Tally(self.model), 0
        with self._inside():
            initialize_layerwise_reload(self._part)

    @property
    def _part(self) -> Any:
        return self.model if self.layers is None else _Layers(self.layers)

    def ready(self, tensors: Sequence[tuple[TensorSpec, Tensor]]) -> None:
        """Do nothing: there is nothing that could be made ready."""

    def forget(self) -> None:
        """Do nothing: nothing was made ready."""

    def places(self, _: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """Return none: vLLM's loaders have their own ways to the live parameters."""
        return {}

    def ways(self) -> Ways:
        """Say how the tensors were loaded."""
        return Ways(0, self._fed, self.why)

    def feed(self, tensors: Sequence[tuple[TensorSpec, Tensor]]) -> None:
        """Load some of a version's tensors, in any order. vLLM keeps those whose layer lacks others."""
        model: Any = self.model
        self._fed += len(tensors)
        with self._inside():
            self._tally.load(model.load_weights, tensors)

    def complete(self) -> None:
        """Check that a whole version has been fed.

        Raises:
            UnexpectedTensors: the model has no use for some of them.
            MissingTensors: a layer did not get all that it is made of.
        """
        # It was fed by another thread, whose stream nothing here waits for.
        _synchronize(self.device)
        unused = self._tally.unused
        if unused and self.whole:
            raise UnexpectedTensors(
                f"{len(unused)} tensors were not loaded by the model: {names(unused)}", tensor=min(unused)
            )
        if missing := self._missing(self._tally):
            raise MissingTensors(
                f"{len(missing)} parameters did not get all their weights: {names(missing)}", tensor=min(missing)
            )

    def _missing(self, tally: Tally) -> list[str]:
        """Name the parameters that lack weights, and remember the layers that share another's."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        layers = [(name, layer, get_layerwise_info(layer)) for name, layer in self.model.named_modules()]
        loaded: set[int] = set()
        for _, layer, info in layers:
            if not info.can_load() or info.load_numel > 0:
                loaded.update(id(parameter) for parameter in _own(layer, info).values())
        missing: list[str] = []
        for name, layer, info in layers:
            own = _own(layer, info)
            if not info.can_load() or not own or is_attention(layer):
                continue
            if info.load_numel > 0:
                missing += [f"{name}.{part}" for part in tally.short(layer)] if self._exact() else []
            elif all(id(parameter) in loaded for parameter in own.values()):
                self._unloaded.append(layer)
            else:
                missing += [f"{name}.{part}" for part in own]
        return missing

    def _exact(self) -> bool:
        # Quantised layers pad and derive parameters; what they lack is seen by the tensors that were not used.
        return self.config.model_config.quantization is None

    def finish(self) -> None:
        """Do the post-load work."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._inside():
            self._reset_scales()
            finalize_layerwise_reload(self._part, self.config.model_config)
            if self.device.type == "cpu":
                self._repack()
        _synchronize(self.device)

    def _reset_scales(self) -> None:
        """Have scales of the KV cache that this version does not bring be what a checkpoint without them gives."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        # Those that the engine computes from its first requests are computed once.
        if getattr(self.config.cache_config, "calculate_kv_scales", False):
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and is_attention(layer) and getattr(layer, "quant_method", None) is not None:
                # vLLM leaves a layer alone of which it has loaded nothing, and creates the scales anew otherwise.
                info.load_numel = max(info.load_numel, 1)

    def _repack(self) -> None:
        """Repeat packing that a reload leaves out on the CPU."""
        for layer in self._unloaded:
            # A tied head computes from a packed copy of the embedding.
            if (method := getattr(layer, "quant_method", None)) is not None and hasattr(layer, "weight"):
                method.process_weights_after_loading(layer)
        for layer in self._part.modules():
            method = getattr(layer, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            experts: Any = getattr(kernel, "fused_experts", None)
            # vLLM 0.32 packs experts when it sets their kernel up, which it does once.
            if hasattr(experts, "process_weights_after_loading") and hasattr(method, "_setup_kernel"):
                _in_place(layer, experts.process_weights_after_loading)

    def undo(self) -> None:
        """Put the old parameters back where layers are open. The model runs again, in part with new weights."""
        from vllm.model_executor.model_loader.reload import layerwise

        model: Any = self.model
        if hasattr(model, "_original_do_torchao_reload"):
            model._do_torchao_reload = model._original_do_torchao_reload
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        layerwise.LOADING_LAYERS.clear()
        self._unloaded.clear()
        self._tally = Tally()


class _Layers:
    """Some layers of a model, as far as vLLM's reload looks at a model."""

    def __init__(self, layers: tuple[Module, ...]) -> None:
        self._layers = layers

    def modules(self) -> Iterator[Module]:
        """Return them, without what is inside them."""
        return iter(self._layers)


def _own(layer: Module, info: Any) -> dict[str, Parameter]:
    """Return the parameters that a layer computes with, also while stand-ins are in their place."""
    if info.can_load() and info.kernel_tensors is not None:
        return dict(info.kernel_tensors[0])
    return {name: value for name, value in layer._parameters.items() if value is not None}


def _in_place(layer: Module, work: Any) -> None:
    """Run `work`, which replaces parameters of `layer`, and keep the storages that they had."""
    before = dict(layer._parameters)
    work(layer)
    for name, old in before.items():
        new = layer._parameters[name]
        if old is not None and new is not None and old.shape == new.shape and old.dtype == new.dtype:
            old.data.copy_(new.data)
            layer._parameters[name] = old


def _synchronize(device: Any) -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)
