"""Real engines come back: after a SIGKILL, after a torn refit, from the checkpoint of their launch."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pitstop.engine import Phase, RolloutEngine, SamplingParams, errors
from pitstop.engine.worker_ports import WorkerOp, WorkerReply
from tests.conftest import Checkpoint
from tests.e2e.trainer import change, trainer

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
ARGS = {
    "enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20,
    "block_size": 32,
}  # fmt: skip


def automatic(path: Path, **options: Any) -> RolloutEngine:
    return RolloutEngine.launch(path, engine_args=ARGS, start_method="fork", recovery="automatic", **options)


def kill(engine: RolloutEngine, n: int = 0) -> None:
    booted = engine.replicas[n].booted
    assert booted is not None
    assert booted.pid is not None
    os.kill(booted.pid, signal.SIGKILL)


async def test_a_killed_engine_serves_again_by_itself_with_the_version_last_published(
    preloaded: None, checkpoint: Checkpoint
) -> None:
    async with automatic(checkpoint("llama", 0)) as engine:
        with trainer(engine.address) as publisher:
            await publisher.connected()
            assert (await publisher.publish(checkpoint("llama", 1), 7))[0] == "committed"
        wanted = await engine.generate([97], GREEDY)
        stream = engine.stream([98], LONG)
        await anext(stream)
        began = time.monotonic()
        kill(engine)
        with pytest.raises(errors.ReplicaDied):
            async for _ in stream:
                pass
        # The trainer is gone, the only engine is dead: the request waits for it.
        again = await asyncio.wait_for(engine.generate([97], GREEDY), 30)
        assert time.monotonic() - began < 15
        assert (again.token_ids, again.spans) == (wanted.token_ids, ((7, 0, 8),))
        assert engine.replicas[0].incarnation == 2


async def test_a_torn_refit_is_repaired_by_itself(
    preloaded: None, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with automatic(checkpoint("llama", 1)) as fresh:
        wanted = await fresh.generate([97], GREEDY)
    async with automatic(checkpoint("llama", 0), replicas=2) as engine:
        call, tears = engine.replicas[0].backend.call_workers, [True]

        async def torn_once(op: WorkerOp) -> list[WorkerReply]:
            replies = list(await call(op))
            if op.verb == "finalize" and tears:
                tears.clear()
                raise errors.RemoteError("the worker lost its way")
            return replies

        monkeypatch.setattr(engine.replicas[0].backend, "call_workers", torn_once)
        report = await engine.refit(checkpoint("llama", 1), weight_version=1)
        assert not report.replicas["replica-0"].committed
        async with asyncio.timeout(10):
            await engine.replicas[0].reached(frozenset({Phase.SERVING}))
        assert [r.weight_version for r in engine.replicas] == [1, 1]
        done = [c async for _, c in engine.generate_async([[97]] * 4, GREEDY)]
        assert {c.replica for c in done} == {"replica-0", "replica-1"}
        assert {tuple(c.token_ids) for c in done} == {tuple(wanted.token_ids)}


async def test_before_the_first_refit_the_checkpoint_of_the_launch_brings_it_back_as_long_as_it_is_unchanged(
    preloaded: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(checkpoint("llama", 0), folder)
    async with RolloutEngine.launch(folder, replicas=2, engine_args=ARGS, start_method="fork") as engine:
        wanted, prints = await engine.generate([97], GREEDY), (await engine.fingerprints())["replica-0"]
        kill(engine)
        await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        with pytest.raises(errors.OfferRejected, match="loaded at launch"):
            await engine.recover(checkpoint("llama", 1))
        report = await engine.recover()
        assert report is not None
        assert list(report.replicas) == ["replica-0"]
        done = [c async for _, c in engine.generate_async([[97]] * 2, GREEDY)]
        assert {c.spans for c in done} == {((0, 0, 8),)}
        assert {tuple(c.token_ids) for c in done} == {tuple(wanted.token_ids)}
        assert (await engine.fingerprints())["replica-0"] == prints
        kill(engine)
        await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        # Its digests are known by now: the same content is taken from anywhere, other content from nowhere.
        with pytest.raises(errors.OfferRejected, match="with other content"):
            await engine.recover(checkpoint("llama", 1))
        assert await engine.recover(checkpoint("llama", 0)) is not None


@pytest.mark.parametrize("how", ["shuffled", "fused", "padded"])
async def test_a_version_comes_back_from_its_checkpoint_though_the_trainer_sent_it_in_another_form(
    preloaded: None, checkpoint: Checkpoint, how: str
) -> None:
    family = "qwen3_moe" if how == "fused" else "tied" if how == "padded" else "llama"
    sent = change(load_file(checkpoint(family, 1) / "model.safetensors"), how)
    async with RolloutEngine.launch(checkpoint(family, 0), engine_args=ARGS, start_method="fork") as engine:
        trim: Any = {"vocabulary": "trim"} if how == "padded" else {}
        await engine.refit(sent, weight_version=1, **trim)
        prints = (await engine.fingerprints())["replica-0"]
        for source in (None, checkpoint(family, 1)):
            kill(engine)
            await engine.replicas[0].reached(frozenset({Phase.DEAD}))
            if source is not None:
                with pytest.raises(errors.OfferRejected, match="with other content"):
                    await engine.recover(checkpoint(family, 0), weight_version=1)
            assert await engine.recover(source) is not None
            assert (await engine.fingerprints())["replica-0"] == prints
            assert (await engine.verify()).replicas["replica-0"].state == "same"


async def test_a_launch_checkpoint_that_was_overwritten_is_not_served_under_its_old_version(
    preloaded: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(checkpoint("llama", 0), folder)
    async with RolloutEngine.launch(folder, engine_args=ARGS, start_method="fork") as engine:
        shutil.copy(checkpoint("llama", 1) / "model.safetensors", folder / "model.safetensors")
        kill(engine)
        await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        for source in (None, folder):
            with pytest.raises(errors.CheckpointUnreadable, match="has changed since the engine booted"):
                await engine.recover(source)
        assert engine.replicas[0].phase is Phase.IDLE
        report = await engine.recover(folder, weight_version=1)
        assert report is not None
        assert engine.weight_version == 1
