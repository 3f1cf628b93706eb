"""Scales of an FP8 KV cache that a checkpoint may lack and a trainer may have. Pure.

Scales that a checkpoint has are tensors of its inventory like any other: every version brings them. A checkpoint that
lacks them leaves them at 1.0; a trainer that calibrates as it trains may add them to a version, all keys and values or
none, and the queries' as well. They hold for that version: one that comes without them has 1.0 again, as it would have
in a fresh engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pitstop.engine.worker_ports import TensorSpec

_ATTENTION: Final = re.compile(r"^(?P<layer>.*\.self_attn)\.(?:q_proj|k_proj|qkv_proj)\.(?:weight|weight_packed)$")
_SCALE: Final = re.compile(r"\.(?:[kvq]_scale|kv_scale|prob_scale|[kvq]_zero_point)$|\.(?:[kv]_cache|q)\.scale$")
_TAKES: Final = frozenset({"compressed-tensors", "fp8", "modelopt"})
"""Quantisations under which vLLM's attention layers have scales to load."""


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is for attention layers' KV caches. It is a parameter only while it loads."""
    return _SCALE.search(name) is not None


def optional_scales(
    tensors: Iterable[TensorSpec], config: Mapping[str, Any], kv_cache_dtype: str
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return the scales that a version may bring beside its checkpoint's tensors, in groups that come whole or not.

    None unless the cache is FP8 and the engine's attention layers take scales: where nobody would use them they are
    refused as any other strange tensor.
    """
    names = [spec.name for spec in tensors]
    method = (config.get("quantization_config") or {}).get("quant_method")
    # The scales of `fp8_ds_mla` are inside the cache.
    fp8 = kv_cache_dtype.startswith("fp8") and kv_cache_dtype != "fp8_ds_mla"
    if not fp8 or method not in _TAKES or any(map(is_kv_scale, names)):
        return ()
    layers = list(dict.fromkeys(found["layer"] for name in names if (found := _ATTENTION.match(name))))

    def group(kinds: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{layer}.{kind}_scale", "float32", (1,)) for layer in layers for kind in kinds)

    return (group("kv"), group("q")) if layers else ()
