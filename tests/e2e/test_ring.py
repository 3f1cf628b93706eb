"""Refits of real engines through the bucket ring: equal to a fresh load, whatever the buckets, staged and in place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pitstop.engine import Outcome, RolloutEngine
from pitstop.engine.errors import DigestMismatch, PitstopError
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import POLICIES, Policy
from pitstop.engine.worker_ports import Mode
from pitstop.transports import Buffers
from pitstop.transports.buckets import cut, place
from pitstop.transports.sources import TensorSource
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch
from tests.e2e.test_refit import LONG, PROMPT, greedy
from tests.e2e.trainer import trainer

MODES: tuple[Mode, ...] = ("staged", "in_place")


def ring(path: Path, buckets: int) -> Buffers:
    """Slots that cut a checkpoint into about so many buckets."""
    from safetensors.torch import load_file

    specs = TensorSource(load_file(path / "model.safetensors").items()).specs()
    whole = place(specs)[1]
    nbytes = max(512, whole // buckets // 512 * 512 + (512 if buckets < 40 else 0))
    assert buckets <= len(cut(specs, nbytes)) + 1
    return Buffers(most_nbytes=0, slots=2, slot_nbytes=nbytes)


async def live(engine: RolloutEngine) -> Any:
    return await engine.fingerprints()


@pytest.mark.parametrize(
    ("family", "buckets"),
    [("llama", 1), ("llama", 4), ("llama", 40), ("tied", 4), ("mixtral", 1), ("mixtral", 40), ("qwen3_moe", 40)],
)
async def test_whatever_the_buckets_the_engine_equals_a_fresh_one_and_the_way_back_is_exact(
    launch: Launch, checkpoint: Checkpoint, family: str, buckets: int
) -> None:
    from safetensors.torch import load_file

    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    async with launch(family, 1) as fresh:
        wanted, truth = await greedy(fresh), await live(fresh)
    async with launch(family, 0, buffers=ring(t0, buckets)) as engine:
        before, first = await greedy(engine), await live(engine)
        version = 0
        for mode in MODES:
            for path, tokens, tensors in ((t1, wanted, truth), (t1, wanted, truth), (t0, before, first)):
                version += 1
                named = list(load_file(path / "model.safetensors").items())
                Random(version).shuffle(named)
                report = await engine.refit(named, weight_version=version, mode=mode)
                assert (report.outcome, report.transport, report.mode) == (Outcome.COMMITTED, "memory_ring", mode)
                assert await live(engine) == tensors
                assert await greedy(engine) == tokens


async def test_a_trainer_of_another_process_goes_through_the_ring_too(launch: Launch, checkpoint: Checkpoint) -> None:
    t0, t1 = checkpoint("llama", 0), checkpoint("llama", 1)
    async with launch(buffers=ring(t0, 4)) as engine:
        before = await greedy(engine)
        with trainer(engine.address) as publisher:
            await publisher.connected()
            version = 0
            for mode in MODES:
                for path in (t1, t0):
                    version += 1
                    said = await publisher.publish(path, version, "shuffled", mode=mode)
                    assert said == ("committed", path_bytes(engine), "shared_memory_ring")
                    assert (await greedy(engine) == before) is (path == t0)


def path_bytes(engine: RolloutEngine) -> int:
    booted = engine.replicas[0].booted
    assert booted is not None
    return sum(spec.nbytes for spec in booted.inventory.tensors)


@pytest.mark.parametrize(("family", "buckets"), [("llama", 1), ("llama", 40), ("qwen3_moe", 4)])
async def test_two_ranks_take_the_same_buckets(
    launch: Launch, checkpoint: Checkpoint, family: str, buckets: int
) -> None:
    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    async with launch(family, 1, tensor_parallel_size=2) as fresh:
        wanted, truth = await greedy(fresh), await live(fresh)
    async with launch(family, 0, tensor_parallel_size=2, buffers=ring(t0, buckets)) as engine:
        before, first = await greedy(engine), await live(engine)
        version = 0
        for mode in MODES:
            for path, tokens, tensors in ((t1, wanted, truth), (t0, before, first)):
                version += 1
                report = await engine.refit(path, weight_version=version, mode=mode)
                assert (report.outcome, report.transport) == (Outcome.COMMITTED, "memory_ring")
                assert await live(engine) == tensors
                assert await greedy(engine) == tokens


@pytest.mark.parametrize("policy", POLICIES)
async def test_streams_go_through_a_refit_in_place_as_their_policy_says(
    launch: Launch, checkpoint: Checkpoint, policy: Policy
) -> None:
    t0, t1 = checkpoint("llama", 0), checkpoint("llama", 1)
    async with launch(buffers=ring(t0, 4)) as engine:
        streams = [asyncio.create_task(engine.generate(PROMPT, LONG)) for _ in range(4)]
        await asyncio.sleep(0.3)
        report = await engine.refit(t1, weight_version=1, mode="in_place", policy=policy)
        assert (report.outcome, report.mode) == (Outcome.COMMITTED, "in_place")
        for done in await asyncio.gather(*streams):
            versions = [span[0] for span in done.spans]
            assert versions == ([0, 1] if policy in ("keep", "recompute") else [0])
            assert done.finish_reason == ("abort" if policy == "abort" else "length")
            assert sum(end - start for _, start, end in done.spans) == len(done.token_ids)


class Corrupt(TensorSource):
    """Says of one tensor that it is what it is not."""

    def pack(self, slots, into, digests):  # type: ignore[no-untyped-def]
        yield from super().pack(slots, into, digests)
        digests[0] += 1


async def test_what_is_not_what_was_sent_never_makes_a_token(launch: Launch, checkpoint: Checkpoint) -> None:
    from safetensors.torch import load_file

    t0, t1 = checkpoint("llama", 0), checkpoint("llama", 1)
    async with launch(buffers=ring(t0, 4)) as engine:
        before = await greedy(engine)
        wrong = Corrupt(load_file(t1 / "model.safetensors").items())
        with pytest.raises(DigestMismatch):
            await engine.refit(wrong, weight_version=1, mode="staged")
        assert engine.replicas[0].phase.value == "serving"
        assert await greedy(engine) == before
        stream = asyncio.create_task(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.2)
        with pytest.raises(DigestMismatch):
            await engine.refit(wrong, weight_version=2, mode="in_place")
        assert engine.replicas[0].phase.value == "quarantined"
        with pytest.raises(PitstopError):
            await stream
        with pytest.raises(PitstopError):
            await engine.generate(PROMPT, LONG)
        await engine.refit(t0, weight_version=3, mode="in_place")
        assert await greedy(engine) == before


@pytest.mark.parametrize("mode", MODES)
async def test_a_trainer_killed_between_two_buckets(launch: Launch, checkpoint: Checkpoint, mode: Mode) -> None:
    t0, t1 = checkpoint("llama", 0), checkpoint("llama", 1)
    async with launch(buffers=ring(t0, 40)) as engine:
        before = await greedy(engine)
        with trainer(engine.address) as publisher:
            await publisher.connected()
            publisher.start(t1, 1, "stuck", mode=mode)
            assert await publisher.said(20) == "stuck"
            publisher.process.kill()
            async with asyncio.timeout(20):
                phase = Phase.SERVING if mode == "staged" else Phase.QUARANTINED
                await engine.replicas[0].reached(frozenset({phase}))
        if mode == "staged":
            assert await greedy(engine) == before
        await engine.refit(t0, weight_version=2, mode=mode)
        assert await greedy(engine) == before
