"""Drafters through the public API: what a trainer has to publish, and what is said of how they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitstop.engine import RolloutEngine, SamplingParams, errors
from pitstop.engine.drafting import ENOUGH
from tests import checkpoints, draft_checkpoints
from tests.draft_checkpoints import MTP_LAYER
from tests.engine.sim import Log
from tests.vllm.test_drafters import _prefixed, _preloaded

__all__ = ["_preloaded"]

PROMPT = tuple(range(97, 117))
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


def launch(model: Path, speculative: dict[str, object], log: Log | None = None, **options: object) -> RolloutEngine:
    args = {
        "enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20,
        "block_size": 32, "max_num_seqs": 256, "speculative_config": speculative,
    }  # fmt: skip
    return RolloutEngine.launch(model, engine_args=args, start_method="fork", observer=log, **options)  # type: ignore[arg-type]


def twin(folder: Path) -> tuple[Path, dict[str, object]]:
    """A drafter that is its target once more: every draft is accepted."""
    own = checkpoints.write(folder / "twin", "llama", 0)
    spec = {"method": "draft_model", "model": str(own), "num_speculative_tokens": 2}
    return checkpoints.write(folder / "llama", "llama", 0), spec


async def many(engine: RolloutEngine) -> list[int]:
    """Make more drafts than it takes to judge them; return the tokens of the first request."""
    prompts = [PROMPT, *([n] * 20 for n in range(60, 67))]
    done = {n: completion async for n, completion in engine.generate_async(prompts, LONG)}
    assert sum(len(one.token_ids) for one in done.values()) > 3 * ENOUGH
    return list(done[0].token_ids)


async def test_b41_a_trained_drafter_is_accepted_as_before_after_a_refit_and_one_left_out_is_refused_by_name(
    tmp_path: Path,
) -> None:
    model, spec = twin(tmp_path)
    zero, one = checkpoints.tensors("llama", 0), checkpoints.tensors("llama", 1)
    log = Log()
    async with launch(model, spec, log, drafter="trained") as engine:
        first = await many(engine)
        with pytest.raises(errors.MissingTensors, match=r"draft\.lm_head\.weight.*drafter='frozen'"):
            await engine.refit(one, weight_version=1)
        with pytest.raises(errors.MissingTensors, match=r"1 tensors .*: draft\.model\.norm\.weight"):
            await engine.refit(
                one | {n: t for n, t in _prefixed(one).items() if n != "draft.model.norm.weight"}, weight_version=1
            )
        # Refused before anything was suspended.
        assert {change.after.value for change in log.transitions} == {"starting", "serving"}
        report = await engine.refit(one | _prefixed(one), weight_version=1)
        before = report.replicas["replica-0"].acceptance
        assert before is not None
        assert (before.rate, before.length) == (1.0, 3.0)
        second = await many(engine)
        report = await engine.refit(zero | _prefixed(zero), weight_version=2)
        after = report.replicas["replica-0"].acceptance
        assert after is not None
        assert (after.rate, after.length) == (1.0, 3.0)
        assert await many(engine) == first != second
        assert "rl.drafter.drops" not in [name for name, _ in log.counts]


async def test_b41_a_frozen_drafter_whose_policy_moves_on_is_told_of(tmp_path: Path) -> None:
    model, spec = twin(tmp_path)
    one = checkpoints.tensors("llama", 1)
    log = Log()
    async with launch(model, spec, log) as engine:
        await many(engine)
        with pytest.raises(errors.UnexpectedTensors, match="launched with drafter='trained'"):
            await engine.refit(one | _prefixed(one), weight_version=1)
        await engine.refit(one, weight_version=1)
        await many(engine)
        report = await engine.refit(checkpoints.tensors("llama", 0), weight_version=2)
        found = report.replicas["replica-0"].acceptance
        assert found is not None
        assert found.rate < 0.1
        assert ("rl.drafter.drops", 1) in log.counts


@pytest.mark.parametrize("drafter", ["trained", "frozen"])
async def test_a_checkpoint_with_draft_layers_is_a_version_whether_they_are_trained_or_not(
    tmp_path: Path, drafter: str
) -> None:
    zero = draft_checkpoints.write_mtp(tmp_path / "zero", 0)
    one = draft_checkpoints.write_mtp(tmp_path / "one", 1, shards=3)
    spec: dict[str, object] = {"method": "mtp", "num_speculative_tokens": 1}
    async with launch(one, spec) as fresh:
        wanted = await many(fresh)
    async with launch(zero, spec, drafter=drafter) as engine:
        first = await many(engine)
        await engine.refit(one, weight_version=1)
        assert await many(engine) == wanted != first
        policy = {n: t for n, t in draft_checkpoints.mtp_tensors(0).items() if not n.startswith(MTP_LAYER)}
        if drafter == "trained":
            with pytest.raises(errors.MissingTensors, match=rf"{MTP_LAYER}eh_proj.weight.*drafter='frozen'"):
                await engine.refit(policy, weight_version=2)
        else:
            await engine.refit(policy, weight_version=2)
            assert await many(engine) == first


async def test_a_checkpoint_with_draft_layers_is_a_version_for_an_engine_without_a_drafter(tmp_path: Path) -> None:
    zero, one = (draft_checkpoints.write_mtp(tmp_path / f"{seed}", seed) for seed in (0, 1))
    args = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20}
    async with RolloutEngine.launch(one, engine_args=args, start_method="fork") as fresh:
        wanted = (await fresh.generate(PROMPT, LONG)).token_ids
    async with RolloutEngine.launch(zero, engine_args=args, start_method="fork") as engine:
        await engine.refit(one, weight_version=1)
        assert (await engine.generate(PROMPT, LONG)).token_ids == wanted
