"""Real engines on the CPU, started by fork: half a second each, after one import of five seconds."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.vllm_backend import VllmBackend
from tests.conftest import Checkpoint
from tests.vllm.harness import Replica

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # What vLLM and torch warn about is theirs.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def preloaded() -> None:
    """Import what an engine core needs, so that it inherits it, and keep the collector from copying it page by page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.model_executor.models.gemma3
        import vllm.model_executor.models.glm4_moe
        import vllm.model_executor.models.gpt2
        import vllm.model_executor.models.llama
        import vllm.model_executor.models.mixtral
        import vllm.model_executor.models.qwen2
        import vllm.model_executor.models.qwen3
        import vllm.model_executor.models.qwen3_moe
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.engine.async_llm
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker
        from vllm import ModelRegistry

        models = vllm.model_executor.models
        # Registered as classes: vLLM inspects what it knows by name only in a subprocess of six seconds.
        ModelRegistry.register_model("GPT2LMHeadModel", models.gpt2.GPT2LMHeadModel)
        ModelRegistry.register_model("Gemma3ForCausalLM", models.gemma3.Gemma3ForCausalLM)
        ModelRegistry.register_model("Glm4MoeForCausalLM", models.glm4_moe.Glm4MoeForCausalLM)
        ModelRegistry.register_model("LlamaForCausalLM", models.llama.LlamaForCausalLM)
        ModelRegistry.register_model("MixtralForCausalLM", models.mixtral.MixtralForCausalLM)
        ModelRegistry.register_model("Qwen2ForCausalLM", models.qwen2.Qwen2ForCausalLM)
        ModelRegistry.register_model("Qwen3ForCausalLM", models.qwen3.Qwen3ForCausalLM)
        ModelRegistry.register_model("Qwen3MoeForCausalLM", models.qwen3_moe.Qwen3MoeForCausalLM)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def declared_receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Declare the tests' receiver as an installed package would, and return its name."""
    name = "tests.vllm.file_receiver:FileReceiver"
    root = tmp_path_factory.mktemp("declared")
    info = root / "pitstop_test_receiver-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pitstop-test-receiver\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[pitstop.receivers]\nfile = {name}\n")
    sys.path.append(str(root))
    yield name
    sys.path.remove(str(root))


class Garage:
    """Starts replicas for one test."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, receiver: str) -> None:
        self._checkpoint, self._folder, self._receiver = checkpoint, folder, receiver
        self._replicas: list[Replica] = []

    async def start(
        self,
        family: str = "llama",
        seed: int = 0,
        *,
        model: Path | None = None,
        stat_loggers: Sequence[Any] = (),
        drafter: Any = None,
        **engine_args: Any,
    ) -> Replica:
        """Start an engine from a checkpoint of a family."""
        backend = self.backend(family, seed, model=model, stat_loggers=stat_loggers, drafter=drafter, **engine_args)
        replica = Replica(backend, self._folder / f"replica-{len(self._replicas)}", self._receiver)
        self._replicas.append(replica)
        await replica.start()
        return replica

    def backend(
        self,
        family: str = "llama",
        seed: int = 0,
        *,
        model: Path | None = None,
        stat_loggers: Sequence[Any] = (),
        drafter: Any = None,
        **engine_args: Any,
    ) -> VllmBackend:
        """Describe an engine for somebody else to start."""
        engine_args = {
            "enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20,
            "block_size": 32, "max_num_seqs": 64, **engine_args,
        }  # fmt: skip
        return VllmBackend(
            str(model or self._checkpoint(family, seed)),
            engine_args=engine_args,
            start_method="fork",
            stat_loggers=stat_loggers,
            drafter=drafter,
        )

    async def close(self) -> None:
        """End them all."""
        for replica in self._replicas:
            await replica.close()


@pytest.fixture
async def garage(
    checkpoint: Checkpoint, tmp_path: Path, preloaded: None, declared_receiver: str
) -> AsyncIterator[Garage]:
    made = Garage(checkpoint, tmp_path, declared_receiver)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """Collect what vLLM leaves to the collector where its warnings about it are not errors."""
    yield
    gc.collect()
