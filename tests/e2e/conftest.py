"""Whole engines through the public API, on real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine import RolloutEngine
from pitstop.transports import Buffers
from tests.conftest import Checkpoint
from tests.vllm.conftest import preloaded

__all__ = ["preloaded"]

HERE = Path(__file__).parent
Launch = Callable[..., RolloutEngine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def launch(checkpoint: Checkpoint, preloaded: None) -> Launch:
    """Describe an engine on a tiny checkpoint; `async with` starts it in half a second."""

    def make(
        family: str = "llama", seed: int = 0, *, replicas: int = 1, buffers: Buffers | None = None, **engine_args: Any
    ) -> RolloutEngine:
        args = {
            "enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20,
            "block_size": 32, "max_num_seqs": 256, **engine_args,
        }  # fmt: skip
        return RolloutEngine.launch(
            checkpoint(family, seed), replicas=replicas, engine_args=args, start_method="fork", buffers=buffers
        )

    return make
