"""Faults met in the field, on real engines. Each test names its row (`tests/FIELD_FAULTS.md`)."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from pitstop.engine import Outcome, RolloutEngine, SamplingParams, errors
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


async def test_b09_buffers_that_no_checkpoint_has_are_bit_equal_after_a_refit(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    """Rotary tables. Memory that a deep sleep gives back is CUDA's alone: its states are in `tests/engine`."""
    async with launch("llama", 0) as engine:
        before = (await engine.fingerprints())["replica-0"]
        rotary = {name for name in before if "cos_sin_cache" in name}
        assert rotary
        await engine.refit(checkpoint("llama", 1), weight_version=1)
        after = (await engine.fingerprints())["replica-0"]
        assert {name: after[name] for name in rotary} == {name: before[name] for name in rotary}
        assert after.keys() == before.keys()
        changed = {name for name in before if after[name] != before[name]}
        assert changed
    async with launch("llama", 1) as fresh:
        assert (await fresh.fingerprints())["replica-0"] == after


@pytest.mark.parametrize("policy", ["wait", "abort", "keep", "recompute"])
async def test_b21_b61_a_refit_under_live_and_just_ended_requests_returns_and_each_mode_does_what_it_says(
    launch: Launch, checkpoint: Checkpoint, policy: str
) -> None:
    async with launch() as engine:
        for version in range(1, 4):
            tasks = [asyncio.create_task(engine.generate([97 + n], LONG)) for n in range(3)]
            short = [asyncio.create_task(engine.generate([97 + n], GREEDY)) for n in range(6)]
            await asyncio.sleep(0.03 + 0.005 * version)
            for task in short[:3]:
                task.cancel()  # about when they end by themselves
            async with asyncio.timeout(20):
                report = await engine.refit(checkpoint("llama", version % 2), weight_version=version, policy=policy)  # type: ignore[arg-type]
            assert report.outcome is Outcome.COMMITTED
            done = await asyncio.gather(*tasks)
            await asyncio.gather(*short, return_exceptions=True)
            reason = "abort" if policy == "abort" else "length"
            assert {c.finish_reason for c in done} == {reason}
            versions = {tuple(s.weight_version for s in c.spans) for c in done}
            assert versions == ({(version - 1, version)} if policy in ("keep", "recompute") else {(version - 1,)})
        assert not engine.replicas[0].flights


@pytest.mark.parametrize("partial", [False, True])
async def test_b27_samples_never_mix_versions_unless_partial_rollouts_were_asked_for(
    launch: Launch, checkpoint: Checkpoint, partial: bool
) -> None:
    async with launch() as engine:
        tasks = [asyncio.create_task(engine.generate([97 + n], LONG)) for n in range(6)]
        for version in range(1, 5):
            await asyncio.sleep(0.05)
            await engine.refit(
                checkpoint("llama", version % 2), weight_version=version, policy="recompute" if partial else "abort"
            )
        done = await asyncio.gather(*tasks)
        for c in done:
            assert c.spans[0].start == 0
            assert all(a.end == b.start for a, b in itertools.pairwise(c.spans))
            assert c.spans[-1].end == len(c.token_ids) == len(c.logprobs)
        if partial:
            assert {c.finish_reason for c in done} == {"length"}
            assert max(len(c.spans) for c in done) > 1
        else:
            assert {c.finish_reason for c in done} == {"abort"}
            assert {len(c.spans) for c in done} == {1}


@pytest.mark.parametrize("how", ["missing", "twice", "extra"])
async def test_b65_an_update_that_is_not_complete_is_refused_and_no_nan_is_ever_served(
    launch: Launch, checkpoint: Checkpoint, how: str
) -> None:
    """By name before anything is suspended; every tensor of the model in turn for the one that is missing."""
    from safetensors.torch import load_file

    whole = load_file(checkpoint("llama", 1) / "model.safetensors")
    wrong: list[tuple[str, list[tuple[str, object]], type[errors.PitstopError]]] = []
    for name, tensor in whole.items():
        if how == "missing":
            wrong.append((name, [(k, v) for k, v in whole.items() if k != name], errors.MissingTensors))
        elif how == "twice":
            wrong.append((name, [*whole.items(), (name, tensor)], errors.RepeatedTensors))
    if how == "extra":
        wrong.append(("model.norm.bias", [*whole.items(), ("model.norm.bias", whole["model.norm.weight"])],
                      errors.UnexpectedTensors))  # fmt: skip
    async with launch() as engine:
        before = await engine.generate([97], GREEDY)
        for name, tensors, kind in wrong:
            with pytest.raises(kind) as raised:
                await engine.refit(iter(tensors), weight_version=1)  # type: ignore[arg-type]
            assert name in str(raised.value)
            assert engine.replicas[0].phase.value == "serving"
        after = await engine.generate([97], GREEDY)
        assert (after.token_ids, after.spans) == (before.token_ids, before.spans)
        assert all(math.isfinite(x) for x in after.logprobs)
        assert (await engine.refit(iter(whole.items()), weight_version=1)).outcome is Outcome.COMMITTED


async def test_b79_ids_beyond_the_tokenizer_come_back_as_ids(checkpoint: Checkpoint, preloaded: None) -> None:
    """The tokenizer knows 259 ids, the table has 320 rows: what is sampled from the padding is an id like any other."""
    async with RolloutEngine.launch(
        checkpoint("llama", 0), start_method="fork",
        engine_args={"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20},
    ) as engine:  # fmt: skip
        params = SamplingParams(max_tokens=64, temperature=2.0, ignore_eos=True)
        done = [c async for _, c in engine.generate_async([[97 + n] for n in range(8)], params)]
        assert [c.error for c in done] == [None] * 8
        assert {len(c.token_ids) for c in done} == {64}
        assert max(t for c in done for t in c.token_ids) >= 259
        assert all(isinstance(c.text, str) for c in done)
        assert (
            await engine.generate([*done[0].prompt_token_ids, *done[0].token_ids], GREEDY)
        ).finish_reason == "length"
