"""Which layers of a live model may be copied into: those that compute from just what a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.vllm_backend.loader_trace import Traced

_PLAIN: Final = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
"""vLLM's ways of computing that use a parameter where it is, on a GPU. Some rearrange it first."""

NEVER_LOADED: Final = frozenset(
    {
        "_expert_map", "expert_mask", "expert_global_to_physical", "expert_physical_to_global",
        "expert_local_to_global", "e_score_correction_bias",
    }
)  # fmt: skip
"""What vLLM's reload leaves alone."""


def kind_of(layer: Module) -> str:
    """Name what may rearrange a layer's parameters after loading; empty if nothing does."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    return type(method).__name__ if isinstance(method, QuantizeMethodBase) else ""


def derives(layer: Module, *, cpu: bool) -> str | None:
    """Say why a layer computes from more than its parameters, if it does."""
    if callable(getattr(layer, "process_weights_after_loading", None)):
        return f"{type(layer).__name__} derives values from what it loads"
    kind = kind_of(layer)
    if kind and kind not in _PLAIN:
        return f"{kind} derives its own form of the weights"
    if cpu and kind and (kind == "UnquantizedFusedMoEMethod" or packs(layer)):
        return "vLLM packs these weights for the CPU"
    return None


def derives_from_others(layer: Module) -> bool:
    """Whether there is post-load work on a layer though nothing may have been loaded into it.

    Latent attention computes from other layers' parameters; scales of a quantised cache that a version does not bring
    are put back.
    """
    return is_attention(layer) and (type(layer).__name__ != "Attention" or _has_scales(layer))


def _has_scales(layer: Module) -> bool:
    return getattr(layer, "quant_method", None) is not None


def is_attention(layer: Module) -> bool:
    """Whether vLLM works on a layer after all others have been loaded."""
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
    except ImportError:
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        return isinstance(layer, Attention | MLAAttention)
    return bool(is_deferred_attention_layer(layer))


def packs(layer: Module) -> bool:
    """Whether vLLM has made a layer compute with a copy of its weight, as it does on the CPU."""
    # A function without memory of its own computes from the weight that it is given.
    multiply: Any = getattr(layer, "cpu_linear", None)
    return getattr(multiply, "__closure__", None) is not None


def differs(live: Tensor, form: Tensor) -> str | None:
    """Say how a live parameter is laid out otherwise than what a checkpoint is loaded into, if it is."""
    for what in ("shape", "dtype"):
        here, there = getattr(live, what), getattr(form, what)
        if here != there:
            return f"has the {what} {_said(here)} in the live model, and {_said(there)} while it loads"
    return "is strided otherwise in the live model" if live.stride() != form.stride() else None


def _said(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def wanted(layer: Module, name: str, parameter: Any) -> int:
    """Return how many elements a checkpoint has for a parameter: padding is not among them."""
    rows = getattr(layer, "shard_indices", None)
    if rows is not None and name == "weight":
        # A vocabulary is padded up to what kernels like.
        return int(rows.num_org_elements) * int(parameter.numel() // max(parameter.shape[0], 1))
    return int(getattr(parameter, "weight_loader_numel", parameter.numel()))


def holdings(layer: Module, prefix: str) -> dict[str, tuple[str, Tensor]]:
    """Return a layer's own parameters and buffers by their full names, each with its short one."""
    return {
        f"{prefix}.{name}" if prefix else name: (name, value)
        for held in (layer._parameters, layer._buffers)
        for name, value in held.items()
        if value is not None
    }


def unfit(
    layer: Module, prefix: str, traced: Traced, first: Mapping[str, str], loaded: Mapping[str, int], *, cpu: bool
) -> str | None:
    """Say why a layer may not be copied into, if so.

    `first` is the first name of each parameter, `loaded` how many elements each gets by copies.
    """
    if (why := derives(layer, cpu=cpu)) is not None:
        return why
    for full, (name, live) in holdings(layer, prefix).items():
        if (base := first.get(full)) is None:
            continue
        if (how := traced.computed.get(base)) is not None:
            return f"{full} {how}"
        form = traced.forms[base]
        got, all_of = loaded.get(base, 0), wanted(layer, name, form)
        if got and (how := differs(live, form)) is not None:
            return f"{full} {how}"
        if got != all_of and (got or (name in layer._parameters and name not in NEVER_LOADED)):
            return f"{full} gets {got} elements of the {all_of} that it has"
    return None
