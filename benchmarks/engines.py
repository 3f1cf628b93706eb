"""Engines for the benchmarks: real vLLM on the CPU, started by fork as the tests do."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from pathlib import Path
from typing import Any

from pitstop.engine import RolloutEngine
from tests.checkpoints import write


def tiny_checkpoint(folder: Path, family: str = "qwen2", seed: int = 0) -> str:
    """Write a tiny random checkpoint; return its folder."""
    return str(write(folder / f"{family}-{seed}", family, seed))


def fast_engine(model: str, *, replicas: int = 1, **engine_args: Any) -> RolloutEngine:
    """Describe an engine that starts in half a second."""
    args = {"enforce_eager": True, "dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20, **engine_args}
    return RolloutEngine.launch(model, replicas=replicas, engine_args=args, start_method="fork")
