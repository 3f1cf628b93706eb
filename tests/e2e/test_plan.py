"""Load plans through the public API: as exact as a fresh load, whatever the way, and said in report and trace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pitstop import telemetry
from pitstop.engine import Outcome, RolloutEngine, SamplingParams
from pitstop.engine.errors import DigestMismatch
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import POLICIES
from pitstop.engine.vllm_backend import plan
from pitstop.engine.vllm_backend.planned import PROVES
from pitstop.telemetry import journal
from pitstop.transports import Buffers
from tests.checkpoints import FAMILIES, shapes
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch
from tests.e2e.test_refit import greedy
from tests.e2e.test_ring import MODES, ring
from tests.e2e.trainer import trainer

PLAIN = {"worker_cls": "tests.vllm.plain_worker.PlainWorker"}


async def told(engine: RolloutEngine, named: Any, version: int, **options: Any) -> Any:
    report = await engine.refit(named, weight_version=version, **options)
    assert report.outcome is Outcome.COMMITTED
    return report.replicas["replica-0"].ways


@pytest.mark.parametrize("buckets", [None, 4, 40])
async def test_planned_versions_equal_a_fresh_engine_in_any_order_and_any_buckets(
    launch: Launch, checkpoint: Checkpoint, buckets: int | None
) -> None:
    from safetensors.torch import load_file

    t0, t1 = checkpoint("qwen2", 0), checkpoint("qwen2", 1)
    async with launch("qwen2", 1, **PLAIN) as fresh:
        wanted, truth = await greedy(fresh), await fresh.fingerprints()
    buffers = None if buckets is None else ring(t0, buckets)
    async with launch("qwen2", 0, buffers=buffers, **PLAIN) as engine:
        before, first = await greedy(engine), await engine.fingerprints()
        ways = await told(engine, t1, 1)
        assert (ways.copied, ways.reloaded) == (0, len(shapes("qwen2")))
        version = 1
        for mode in MODES:
            for path, tokens, tensors in ((t0, before, first), (t1, wanted, truth), (t1, wanted, truth)):
                version += 1
                named = list(load_file(path / "model.safetensors").items())
                Random(version).shuffle(named)
                ways = await told(engine, named, version, mode=mode)
                assert (ways.copied, ways.reloaded, ways.why) == (len(named), 0, "")
                assert ways.straight == (len(named) if mode == "in_place" else 0)
                assert await engine.fingerprints() == tensors
                assert await greedy(engine) == tokens


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_is_copied_is_exact_in_every_family_there_and_back(
    launch: Launch, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    from safetensors.torch import load_file

    defaults: Any = plan.learn.__kwdefaults__
    monkeypatch.setitem(defaults, "least", 0.0)
    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    async with launch(family, 1, **PLAIN) as fresh:
        new = await greedy(fresh), await fresh.fingerprints()
    async with launch(family, 0, buffers=ring(t0, 40), **PLAIN) as engine:
        old = await greedy(engine), await engine.fingerprints()
        await told(engine, t1, 1)
        version = 1
        for mode in MODES:
            for path, expected in ((t1, new), (t0, old), (t1, new), (t0, old)):
                version += 1
                named = list(load_file(path / "model.safetensors").items())
                Random(version).shuffle(named)
                ways = await told(engine, named, version, mode=mode)
                # Routers are loaded with the experts, which are packed here.
                dense = [name for name, _ in named if ".mlp." not in name and ".block_sparse_moe." not in name]
                assert ways.copied >= len(dense), ways
                assert (await greedy(engine), await engine.fingerprints()) == expected


async def test_the_way_of_every_tensor_is_told_on_request(launch: Launch, checkpoint: Checkpoint) -> None:
    async with launch("llama", 0, replicas=2, **PLAIN) as engine:
        ways = await engine.load_ways()
        assert set(ways) == {"replica-0", "replica-1"}
        assert {way for found in ways.values() for way in found.values()} == {PROVES}
        await told(engine, checkpoint("llama", 1), 1)
        ways = await engine.load_ways()
        assert {name: set(found.values()) for name, found in ways.items()} == {
            "replica-0": {"copied"}, "replica-1": {"copied"},
        }  # fmt: skip
        assert set(ways["replica-0"]) == set(shapes("llama"))


async def test_weights_beneath_adapters_are_copied_too(launch: Launch, checkpoint: Checkpoint) -> None:
    args = {"enable_lora": True, "max_lora_rank": 8, **PLAIN}
    async with launch("llama", 1, **args) as fresh:
        wanted = await greedy(fresh)
    async with launch("llama", 0, **args) as engine:
        before = await greedy(engine)
        for version, (path, tokens) in enumerate(((1, wanted), (0, before), (1, wanted)), 1):
            ways = await told(engine, checkpoint("llama", path), version)
            assert await greedy(engine) == tokens
        assert ways.copied + ways.reloaded == len(shapes("llama"))
        assert ways.copied, ways.why


@pytest.mark.parametrize("policy", POLICIES)
async def test_requests_in_flight_live_through_planned_swaps(
    launch: Launch, checkpoint: Checkpoint, policy: Any
) -> None:
    async with launch("llama", 0, **PLAIN) as engine:
        await told(engine, checkpoint("llama", 1), 1)
        long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate([97 + n], long)) for n in range(16)]
        await asyncio.sleep(0.1)
        ways = await told(engine, checkpoint("llama", 0), 2, policy=policy)
        assert ways.copied == len(shapes("llama"))
        done = await asyncio.gather(*tasks)
        assert {completion.finish_reason for completion in done} <= {"length", "abort"}
        for completion in done:
            assert completion.spans[0][0] == 1
            assert completion.spans[-1][2] == len(completion.token_ids)


async def test_a_damaged_version_is_torn_in_place_and_repaired_by_the_next_through_the_plan(
    launch: Launch, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    t0, t1 = checkpoint("llama", 0), checkpoint("llama", 1)
    async with launch("llama", 1, **PLAIN) as fresh:
        wanted, truth = await greedy(fresh), await fresh.fingerprints()
    async with launch("llama", 0, buffers=Buffers(most_nbytes=0, slots=2, slot_nbytes=4096), **PLAIN) as engine:
        await told(engine, t1, 1)
        seal = engine._coordinator._transport.seal

        async def lie(trailer: Any) -> None:
            from dataclasses import replace

            await seal(replace(trailer, digests=(trailer.digests[0] ^ 1, *trailer.digests[1:])))

        monkeypatch.setattr(engine._coordinator._transport, "seal", lie)
        with pytest.raises(DigestMismatch):
            await engine.refit(t0, weight_version=2, mode="in_place")
        assert engine.replicas[0].phase is Phase.QUARANTINED
        monkeypatch.setattr(engine._coordinator._transport, "seal", seal)
        named = list(load_file(t1 / "model.safetensors").items())
        assert (await told(engine, named, 3, mode="in_place")).copied == len(named)
        assert await engine.fingerprints() == truth
        assert await greedy(engine) == wanted


async def test_the_trace_says_which_way_tensors_went(launch: Launch, checkpoint: Checkpoint, tmp_path: Path) -> None:
    with telemetry.configure(tmp_path, role="fleet", level=2, sample=1.0):
        async with launch("llama", 0, **PLAIN) as engine:
            with trainer(engine.address, tmp_path) as publisher:
                await publisher.connected()
                for version in (1, 2):
                    assert (await publisher.publish(checkpoint("llama", version % 2), version))[0] == "committed"
    first, second = sorted(journal.read(tmp_path).named("rl.finalize"), key=lambda span: span.start)
    count = len(shapes("llama"))
    assert (first.attributes["rl.finalize.copied"], first.attributes["rl.finalize.reloaded"]) == (0, count)
    assert "proves the load plan" in str(first.attributes["rl.finalize.why_reloaded"])
    assert (second.attributes["rl.finalize.copied"], second.attributes["rl.finalize.reloaded"]) == (count, 0)
