"""Engines for the benchmarks: real vLLM on the CPU, started by fork as the tests do."""

from __future__ import annotations

import json
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from pathlib import Path
from typing import Any

from pitstop.engine import RolloutEngine
from pitstop.engine.ports import Observer
from tests.checkpoints import write


def tiny_checkpoint(folder: Path, family: str = "qwen2", seed: int = 0) -> str:
    """Write a tiny random checkpoint; return its folder."""
    return str(write(folder / f"{family}-{seed}", family, seed))


def fast_engine(
    model: str,
    *,
    replicas: int = 1,
    observer: Observer | None = None,
    recovery: Any = "manual",
    start_method: Any = "fork",
    **engine_args: Any,
) -> RolloutEngine:
    """Describe an engine that starts in half a second."""
    args = {"enforce_eager": True, "dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20, **engine_args}
    return RolloutEngine.launch(
        model, replicas=replicas, engine_args=args, start_method=start_method, observer=observer, recovery=recovery
    )


def wide_checkpoint(folder: Path, mib: int, tensors: int) -> tuple[str, int]:
    """Write a random bf16 Llama of about `mib` MiB in about `tensors` tensors; return its folder and their number."""
    import torch
    from safetensors.torch import save_file

    from tests.checkpoints import config, tokenizer_json

    layers = max(1, (tensors - 3) // 9)
    # A layer has 4 h^2 + 3 h (4 h) = 16 h^2 parameters of two bytes.
    hidden = max(64, round((mib * 2**20 / layers / 32) ** 0.5 / 64) * 64)
    inner, vocab = 4 * hidden, 512
    made = config("llama") | {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "head_dim": 64,
        "num_key_value_heads": hidden // 64, "intermediate_size": inner, "vocab_size": vocab, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    for n in range(layers):
        at = f"model.layers.{n}."
        shapes |= {at + f"self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {at + f"mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (hidden, inner)}
        shapes |= {at + f"{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    torch.manual_seed(0)
    content = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        for name, shape in shapes.items()
    }
    path = folder / "wide"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(made))
    (path / "tokenizer.json").write_text(tokenizer_json())
    save_file(content, path / "model.safetensors", metadata={"format": "pt"})
    return str(path), len(content)
