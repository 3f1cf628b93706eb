"""Engines that die, are closed, or never come up."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import pytest

from pitstop.engine.errors import CheckpointUnreadable, EngineClosed, ReplicaDied, WorkerFailed
from pitstop.engine.vllm_backend import EngineArgumentRejected, VllmBackend, host
from pitstop.engine.vllm_backend.processes import descendants, ended, hold, segments
from tests.checkpoints import tensors
from tests.conftest import Checkpoint
from tests.vllm.conftest import Garage
from tests.vllm.harness import GREEDY, Replica, request, until


def engine_pid(live: Replica) -> int:
    assert live.booted.pid is not None
    return live.booted.pid


async def test_a_killed_engine_ends_every_leg_with_what_it_had_made(garage: Garage) -> None:
    live = await garage.start()
    whole = await live.run(request(max_tokens=400, text=True))
    how: list[dict[str, Any]] = [
        {"deltas": True},
        {"deltas": True, "text": True},
        {"deltas": False, "text": True},
        {"deltas": False},
    ]
    bare = replace(GREEDY, logprobs=False)
    legs = [await live.backend.submit(request(max_tokens=400, salt=f"{n}", **each)) for n, each in enumerate(how)]
    legs.append(await live.backend.submit(request(max_tokens=400, salt="bare", params=bare)))
    read = await until(legs[0], 10)
    await until(legs[4], 10)
    dying = asyncio.create_task(live.backend.died())
    await asyncio.sleep(0)
    started = monotonic()
    os.kill(engine_pid(live), signal.SIGKILL)
    assert isinstance(await dying, ReplicaDied)
    assert monotonic() - started < 0.5
    assert "SIGKILL" in str(await dying)
    for n, leg in enumerate(legs):
        # What the engine had made when it died is lost only where nobody has it.
        with pytest.raises(ReplicaDied):
            await asyncio.wait_for(until(leg, 10_000), 5)
        rest, made = leg.partial(), leg.made
        assert made >= 5
        if n != 4:
            assert len(rest.logprobs) == len(rest.token_ids)
        if n in (1, 2, 3):
            assert list(rest.token_ids) == whole.token_ids[:made]
        if n in (1, 2):
            assert rest.text
            assert whole.text.startswith(rest.text)
        if n == 0:
            taken = [token for piece in read for token in piece.token_ids]
            assert [*taken, *rest.token_ids] == whole.token_ids[:made]
        assert leg.partial().token_ids == []
        leg.abort()
    assert monotonic() - started < 5


async def test_calls_in_flight_and_later_ones_end_with_the_death(garage: Garage) -> None:
    live = await garage.start()
    os.kill(engine_pid(live), signal.SIGSTOP)
    calls = [
        asyncio.create_task(work)
        for work in (
            live.backend.suspend("recompute"),
            live.backend.reset_cache(),
            live.tell("describe", ""),
            live.backend.resume(),
        )
    ]
    await asyncio.sleep(0)
    os.kill(engine_pid(live), signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert [type(result) for result in results] == [ReplicaDied] * 4
    with pytest.raises(ReplicaDied):
        await live.run()
    with pytest.raises(ReplicaDied):
        await live.backend.suspend("keep")


async def test_an_engine_that_dies_idle_is_noticed_and_started_again(garage: Garage) -> None:
    live = await garage.start()
    whole = await live.run()
    assert live.booted.weight_version == 0
    os.kill(engine_pid(live), signal.SIGKILL)
    assert isinstance(await asyncio.wait_for(live.backend.died(), 5), ReplicaDied)
    await live.close()
    await live.start(incarnation=2)
    # It holds the launch checkpoint, which proves nothing about where the fleet is.
    assert live.booted.weight_version is None
    assert [place.incarnation for place in live.booted.layout] == [2]
    await live.refit(tensors("llama", 0))
    assert (await live.run(salt="w1"))[:2] == whole[:2]


async def test_an_engine_that_fails_by_itself_has_died(garage: Garage) -> None:
    live = await garage.start()
    life = live.backend._life
    assert life is not None
    leg = await live.backend.submit(request(max_tokens=400))
    await until(leg, 2)
    # The core raises on a request type of its own that means "a worker is gone".
    from vllm.v1.engine import EngineCoreRequestType

    await life.llm.engine_core._send_input(EngineCoreRequestType.EXECUTOR_FAILED, b"")
    with pytest.raises(ReplicaDied):
        await asyncio.wait_for(until(leg, 10_000), 5)
    assert isinstance(await asyncio.wait_for(live.backend.died(), 5), ReplicaDied)


async def test_closing_ends_legs_calls_and_processes(garage: Garage) -> None:
    live = await garage.start(tensor_parallel_size=2)
    leg = await live.backend.submit(request(max_tokens=400))
    pids = [engine_pid(live), *descendants(engine_pid(live))]
    pidfds = [pidfd for pid in pids if (pidfd := hold(pid)) is not None]
    shared = segments(pids)
    assert len(pidfds) >= 3
    assert shared
    waiting = asyncio.create_task(until(leg, 10_000))
    dying = asyncio.create_task(live.backend.died())
    await asyncio.sleep(0)
    await live.close()
    assert ended(pidfds, 0)
    assert not any(map(os.path.exists, shared))
    with pytest.raises(EngineClosed):
        await waiting
    with pytest.raises(EngineClosed):
        await live.run()
    assert not dying.done()
    dying.cancel()
    await live.close()
    for pidfd in pidfds:
        os.close(pidfd)


async def test_closing_in_a_cancelled_scope_still_ends_the_processes(garage: Garage) -> None:
    live = await garage.start()
    pidfd = hold(engine_pid(live))
    assert pidfd is not None
    with anyio.CancelScope() as scope:
        scope.cancel()
        await live.backend.close()
    assert ended([pidfd], 0)
    os.close(pidfd)


def refused(model: str | Path, **engine_args: Any) -> VllmBackend:
    return VllmBackend(str(model), engine_args=engine_args, start_method="fork")


@pytest.mark.parametrize(
    ("engine_args", "said"),
    [
        ({"max_model_length": 64}, "did you mean max_model_len"),
        ({"worker_extension_cls": "mine.Extension"}, "PitstopWorker"),
        ({"generation_config": "auto"}, "generation_config is 'vllm'"),
        ({"data_parallel_size": 2}, "replicas"),
    ],
)
async def test_engine_arguments_that_cannot_be_are_refused(
    checkpoint: Checkpoint, preloaded: None, engine_args: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineArgumentRejected, match=said):
        await refused(checkpoint(), **engine_args).start("replica-0", 1)


async def test_what_vllm_refuses_is_a_typed_error(checkpoint: Checkpoint, preloaded: None) -> None:
    with pytest.raises(WorkerFailed, match="failed to start"):
        await refused(checkpoint(), max_model_len=1 << 20).start("replica-0", 1)


async def test_a_checkpoint_that_is_cut_short_is_found_before_anything_starts(
    checkpoint: Checkpoint, preloaded: None, tmp_path: Path
) -> None:
    for file in checkpoint().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -1 if file.suffix == ".safetensors" else None])
    with pytest.raises(CheckpointUnreadable, match="its header says"):
        await refused(tmp_path).start("replica-0", 1)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_start_that_nobody_waits_for_any_more_leaves_no_engine(
    checkpoint: Checkpoint, preloaded: None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = VllmBackend(str(checkpoint()), engine_args={"enforce_eager": True}, start_method="fork")
    starting = asyncio.create_task(backend.start("replica-0", 1))
    spawned = await _first_child(lambda: backend._boot)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if how == "cancel":
            starting.cancel()
        await backend.close()
        with pytest.raises((asyncio.CancelledError, EngineClosed)):
            await starting
        del starting
        gc.collect()
    assert [str(warning.message) for warning in seen if "zmq" in str(warning.message)] == []
    assert ended([spawned], 5)
    os.close(spawned)


async def test_a_killed_engine_leaves_no_descriptor_and_no_socket_to_the_garbage_collector(
    checkpoint: Checkpoint, preloaded: None
) -> None:
    def held() -> list[str]:
        folder = host._runs[os.getpid()].path
        return [*os.listdir("/proc/self/fd"), *(path.name for path in folder.iterdir() if path.is_socket())]

    engine_args = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_model_len": 256}
    backend = VllmBackend(str(checkpoint()), engine_args=engine_args, start_method="fork")
    most = 0
    gc.collect()
    gc.disable()
    try:
        for life in (1, 2, 3):
            booted = await backend.start("replica-0", life)
            assert booted.pid is not None
            os.kill(booted.pid, signal.SIGKILL)
            await backend.died()
            await backend.close()
            most = most or len(held())
            async with asyncio.timeout(5):
                while len(held()) > most:  # noqa: ASYNC110 - vLLM's own watch ends a moment later
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def _first_child(boot: Callable[[], Any]) -> int:
    from pitstop.engine.vllm_backend.processes import children_of_thread

    while True:
        await asyncio.sleep(0.005)
        for pid in children_of_thread(boot()._thread.native_id) if boot() is not None else ():
            if (pidfd := hold(pid)) is not None:
                return pidfd
