"""What all tests share. Nothing here imports torch or vLLM: a test that needs them asks for a fixture that does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("pitstop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pitstop")

# Read when vLLM is first imported, in this process or in an engine's.
os.environ.update(
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    # libgomp does not survive a fork, and one thread is the fastest on tiny models.
    OMP_NUM_THREADS="1",
    # The first request with logprobs would compile for two seconds otherwise.
    TORCHDYNAMO_DISABLE="1",
    TOKENIZERS_PARALLELISM="false",
)

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return `make(family, seed)`: the folder of a tiny random checkpoint, written once a session."""
    from tests import checkpoints

    root = tmp_path_factory.mktemp("checkpoints")

    def make(family: str = "llama", seed: int = 0, *, dtype: str = "float32") -> Path:
        folder = root / f"{family}-{seed}-{dtype}"
        return folder if folder.exists() else checkpoints.write(folder, family, seed, dtype=dtype)

    return make
