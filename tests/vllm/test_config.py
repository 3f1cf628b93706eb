"""What real engines are started with."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from pitstop.engine.errors import UnsupportedPolicy, from_record
from pitstop.engine.vllm_backend import Seat, VllmBackend
from pitstop.engine.worker_ports import WorkerOp
from tests.conftest import Checkpoint
from tests.vllm.conftest import Garage
from tests.vllm.harness import GREEDY, PROMPT, Replica

NAMES = ("VLLM_PORT", "VLLM_CACHE_ROOT", "CUDA_VISIBLE_DEVICES", "VLLM_WORKER_MULTIPROC_METHOD")


async def environment(backend: VllmBackend) -> dict[str, str | None]:
    """Return what the worker of a replica sees."""

    def read(_: Any) -> dict[str, str | None]:
        import os

        return {name: os.environ.get(name) for name in NAMES}

    assert backend._life is not None
    found: list[dict[str, str | None]] = await backend._life.llm.collective_rpc(cloudpickle.dumps(read))
    return found[0]


async def test_engines_that_start_at_once_have_ports_of_their_own_and_the_environment_is_as_it_was(
    garage: Garage, checkpoint: Checkpoint
) -> None:
    before = {name: os.environ.get(name) for name in NAMES}
    args = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20}
    backends = [
        VllmBackend(str(checkpoint("llama", 0)), engine_args=args, start_method="fork", seat=Seat(n, 2)) for n in (0, 1)
    ]
    try:
        booted = await asyncio.gather(*(each.start(f"replica-{n}", 1) for n, each in enumerate(backends)))
        assert {name: os.environ.get(name) for name in NAMES} == before
        assert [rank.host for each in booted for rank in each.layout] == [socket.gethostname()] * 2
        seen = [await environment(each) for each in backends]
        ports = [int(each["VLLM_PORT"] or 0) for each in seen]
        assert abs(ports[0] - ports[1]) >= 100
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", port - 1))
    finally:
        for each in backends:
            await each.close()
    assert {name: os.environ.get(name) for name in NAMES} == before


async def test_a_request_ends_before_a_drafter_would_leave_the_context(garage: Garage) -> None:
    drafter = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    drafting = await garage.start(speculative_config=drafter, max_model_len=128)
    plain = await garage.start(speculative_config={**drafter, "num_speculative_tokens": 0}, max_model_len=128)
    counts = []
    for replica in (drafting, plain):
        made = await replica.run(max_tokens=128 - len(PROMPT), params=GREEDY)
        assert made.last.finish_reason == "length"
        counts.append(len(made.token_ids))
    assert counts == [128 - len(PROMPT) - 5, 128 - len(PROMPT)]


async def test_prefix_caching_is_on_unless_it_was_turned_off(garage: Garage) -> None:
    def caching(replica: Replica) -> bool:
        assert replica.backend._life is not None
        return bool(replica.backend._life.llm.vllm_config.cache_config.enable_prefix_caching)

    assert [caching(await garage.start()), caching(await garage.start(enable_prefix_caching=False))] == [True, False]


async def test_an_engine_with_a_profiler_writes_what_it_did_and_one_without_says_how_to_get_one(
    garage: Garage, tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    live = await garage.start(profiler_config={"profiler": "torch", "torch_profiler_dir": str(folder)})
    await live.ask("start_profile", "")
    await live.run(max_tokens=4)
    await live.ask("stop_profile", "")
    assert any(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    plain = await garage.start()
    reply = (await plain.backend.call_workers(WorkerOp("start_profile")))[0]
    assert reply.error is not None
    with pytest.raises(UnsupportedPolicy, match="profiler_config"):
        raise from_record(reply.error)
