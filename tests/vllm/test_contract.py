"""The vLLM backend keeps the contract, with versions that come through the real transport."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pitstop.engine.contract import BackendBench, BackendContract
from pitstop.engine.vllm_backend import VllmBackend
from pitstop.transports.memory_link import memory_sending
from tests.checkpoints import tensors
from tests.conftest import Checkpoint
from tests.transports.rig import rig
from tests.vllm.harness import PROMPT

ARGS = {
    "enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20,
    "block_size": 32, "max_num_seqs": 64,
}  # fmt: skip


@pytest.mark.parametrize("claim", BackendContract.claims())
async def test_the_vllm_backend_keeps_the_contract(
    claim: str, checkpoint: Checkpoint, preloaded: None, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[BackendBench]:
        backend = VllmBackend(str(checkpoint("llama", 0)), engine_args=ARGS, start_method="fork")

        async def kill() -> None:
            assert backend._life is not None
            os.kill(backend._life.pid, signal.SIGKILL)

        async with rig(tmp_path) as engine:
            try:
                yield BackendBench(
                    backend=backend, transport=engine.transport, prompt=PROMPT, kill=kill,
                    sending=lambda version: memory_sending(tensors("llama", version), weight_version=version),
                )  # fmt: skip
            finally:
                await backend.close()

    await BackendContract(make).check(claim)
