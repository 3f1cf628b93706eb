"""Adapters beside the weights of a real engine: the right version answers, and no cache entry of another."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pitstop.engine import RolloutEngine, SamplingParams, errors
from pitstop.transports import merged_tensors
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch
from tests.transports.rig import until

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(97, 117)) * 8  # five blocks of 32
CONFIG = {"r": 4, "lora_alpha": 8}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
SIZES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.down_proj": (64, 128),
}


def adapter(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for place, (rows, columns) in SIZES.items():
            home = f"base_model.model.model.layers.{layer}.{place}"
            tensors[f"{home}.lora_A.weight"] = 0.3 * torch.randn(4, columns, generator=made)
            tensors[f"{home}.lora_B.weight"] = 0.3 * torch.randn(rows, 4, generator=made)
    return tensors


async def tokens(engine: RolloutEngine, name: str | None = None) -> tuple[list[int], int]:
    done = await engine.generate(PROMPT, GREEDY, adapter=name)
    return list(done.token_ids), done.cached_tokens or 0


async def expected(launch: Launch, path: Path, *adapters: dict[str, Tensor]) -> list[list[int]]:
    """Return what engines say whose weights have the adapters merged in."""
    base = load_file(path / "model.safetensors")
    said = []
    async with launch("llama", 0) as engine:
        for n, one in enumerate(adapters):
            await engine.refit(merged_tensors(base, one, CONFIG), weight_version=n + 1)
            said.append((await tokens(engine))[0])
    return said


async def test_b39_an_adapter_reloaded_under_its_name_answers_from_no_cache_entry_of_the_old_one(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    old, new = adapter(1), adapter(2)
    wanted_old, wanted_new = await expected(launch, checkpoint("llama", 0), old, new)
    assert wanted_old != wanted_new
    async with launch("llama", 0, **LORA) as engine:
        base, _ = await tokens(engine)
        await engine.refit_adapter("math", old, CONFIG, weight_version=1)
        assert await tokens(engine, "math") == (wanted_old, 0)
        said, cached = await tokens(engine, "math")
        assert said == wanted_old
        assert cached >= 128
        assert (await tokens(engine)) == (base, cached)
        await engine.refit_adapter("math", new, CONFIG, weight_version=2)
        assert await tokens(engine, "math") == (wanted_new, 0)
        assert (await tokens(engine)) == (base, cached)
        assert (await tokens(engine, "math")) == (wanted_new, cached)
        assert engine.adapters == {"math": 2}


async def test_a_request_ends_on_the_version_that_it_began_with_and_says_which(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    old, new = adapter(1), adapter(2)
    async with launch("llama", 0, **LORA) as engine:
        await engine.refit_adapter("math", old, CONFIG, weight_version=5)
        alone = await engine.generate(PROMPT, LONG, adapter="math")
        stream = engine.stream(PROMPT, LONG, adapter="math")
        chunks = [await anext(stream)]
        run = Path(stream.adapter.path).parent  # type: ignore[union-attr]
        await engine.refit_adapter("math", new, CONFIG, weight_version=6)
        after = await engine.generate(PROMPT, GREEDY, adapter="math")
        assert sorted(path.name for path in run.glob("adapter-*")) == ["adapter-1", "adapter-2"]
        chunks += [chunk async for chunk in stream]
        assert [t for chunk in chunks for t in chunk.token_ids] == list(alone.token_ids)
        assert stream.adapter is not None
        assert (stream.adapter.name, stream.adapter.weight_version) == ("math", 5)
        assert after.adapter is not None
        assert after.adapter.weight_version == 6
        assert (await engine.generate(PROMPT, GREEDY)).adapter is None
        life: Any = engine.replicas[0].backend
        await until(lambda: [path.name for path in run.glob("adapter-*")] == ["adapter-2"])
        assert list(await life._life.llm.engine_core.list_loras_async()) == [2]
        await engine.drop_adapter("math")
        await until(lambda: not list(run.glob("adapter-*")))
        assert not await life._life.llm.engine_core.list_loras_async()
        with pytest.raises(errors.InvalidRequest, match="no adapter named 'math'"):
            await engine.generate(PROMPT, GREEDY, adapter="math")


async def test_the_weights_beneath_an_adapter_are_refitted_under_it(launch: Launch, checkpoint: Checkpoint) -> None:
    one = adapter(1)
    base = load_file(checkpoint("llama", 1) / "model.safetensors")
    async with launch("llama", 1) as fresh:
        wanted, _ = await tokens(fresh)
        await fresh.refit(merged_tensors(base, one, CONFIG), weight_version=1)
        wanted_adapted, _ = await tokens(fresh)
    async with launch("llama", 0, **LORA) as engine:
        await engine.refit_adapter("math", one, CONFIG, weight_version=1)
        before, _ = await tokens(engine, "math")
        await engine.refit(checkpoint("llama", 1), weight_version=1)
        assert await tokens(engine) == (wanted, 0)
        assert await tokens(engine, "math") == (wanted_adapted, 0)
        assert before != wanted_adapted
        await engine.refit(checkpoint("llama", 0), weight_version=2)
        assert await tokens(engine, "math") == (before, 0)


async def test_a_replica_that_was_started_anew_runs_the_adapters_that_it_missed(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    (wanted,) = await expected(launch, checkpoint("llama", 0), adapter(1))
    async with launch("llama", 0, **LORA) as engine:
        await engine.refit_adapter("math", adapter(1), CONFIG, weight_version=1)
        life: Any = engine.replicas[0].backend
        os.kill(life._life.pid, signal.SIGKILL)
        await until(lambda: engine.replicas[0].phase.value == "dead")
        with pytest.raises(errors.NotServing):
            await engine.refit_adapter("math", adapter(2), CONFIG, weight_version=2)
        await engine.recover()
        assert (await tokens(engine, "math"))[0] == wanted


async def test_more_adapters_than_an_engine_holds_are_loaded_when_they_are_named(launch: Launch) -> None:
    async with launch("llama", 0, **LORA) as engine:
        wanted = {}
        for seed in range(1, 5):
            await engine.refit_adapter(f"a{seed}", adapter(seed), CONFIG, weight_version=1)
            wanted[f"a{seed}"] = (await tokens(engine, f"a{seed}"))[0]
        assert len({tuple(said) for said in wanted.values()}) == 4
        life: Any = engine.replicas[0].backend
        assert len(list(await life._life.llm.engine_core.list_loras_async())) == 2
        assert {name: (await tokens(engine, name))[0] for name in wanted} == wanted


async def test_a_sleep_that_discards_weights_discards_adapters_which_are_loaded_again(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    async with launch("llama", 0, **LORA) as engine:
        await engine.refit_adapter("math", adapter(1), CONFIG, weight_version=1)
        wanted, _ = await tokens(engine, "math")
        life: Any = engine.replicas[0].backend
        await engine.sleep(2)
        assert not await life._life.llm.engine_core.list_loras_async()
        await engine.wake_up()
        await engine.refit(checkpoint("llama", 0), weight_version=1)
        assert await tokens(engine, "math") == (wanted, 0)


async def test_an_adapter_from_its_folder_is_scaled_as_its_config_says(
    launch: Launch, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    one = adapter(1)
    config = {"r": 64, "lora_alpha": 8, "rank_pattern": {".*": 4}, "alpha_pattern": {"mlp.down_proj": 2}}
    base = load_file(checkpoint("llama", 0) / "model.safetensors")
    async with launch("llama", 0) as fresh:
        await fresh.refit(merged_tensors(base, one, config), weight_version=1)
        wanted, _ = await tokens(fresh)
        await fresh.refit(merged_tensors(base, one, CONFIG), weight_version=2)
        assert (await tokens(fresh))[0] != wanted
    folder = tmp_path / "saved"
    folder.mkdir()
    save_file(one, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LORA"}))
    async with launch("llama", 0, **LORA) as engine:
        await engine.refit_adapter("math", folder, weight_version=1)
        assert (await tokens(engine, "math"))[0] == wanted


async def test_an_adapter_that_cannot_be_leaves_everything_as_it_was(launch: Launch, tmp_path: Path) -> None:
    good = adapter(1)
    far = {name.replace("layers.1", "layers.9"): tensor for name, tensor in good.items()}
    first = next(iter(good))
    nan = good | {first: torch.full_like(good[first], math.nan)}
    wide = {name: torch.cat([t] * 4, dim=0 if "_A" in name else 1) for name, t in good.items()}
    head = good | {"base_model.model.lm_head.weight": torch.randn(320, 64)}
    async with launch("llama", 0, replicas=2, **LORA) as engine:
        await engine.refit_adapter("math", good, CONFIG, weight_version=3)
        wanted, _ = await tokens(engine, "math")
        for source, config, error, why in (
            (far, CONFIG, errors.AdapterRejected, r"layers\.9"),
            (nan, CONFIG, errors.AdapterRejected, "not finite"),
            (head, CONFIG, errors.AdapterRejected, "lm_head.weight is trained whole"),
            (good, None, errors.AdapterRejected, "config"),
            ({}, CONFIG, errors.AdapterRejected, "no tensors"),
            (good, {**CONFIG, "use_dora": True}, errors.AdapterRejected, "use_dora"),
            (wide, {"r": 16, "lora_alpha": 8}, errors.RemoteError, "max_lora_rank"),
            (tmp_path / "absent", None, errors.CheckpointUnreadable, "absent"),
        ):
            with pytest.raises(error, match=why):
                await engine.refit_adapter("math", source, config, weight_version=4)
            assert engine.adapters == {"math": 3}
        with pytest.raises(errors.StaleVersion, match="version 3 of adapter math is not above 3"):
            await engine.refit_adapter("math", good, CONFIG, weight_version=3)
        with pytest.raises(errors.InvalidRequest, match="did you mean math"):
            engine.stream(PROMPT, adapter="maths")
        assert [(await tokens(engine, "math"))[0] for _ in range(4)] == [wanted] * 4
        assert all(replica.phase.value == "serving" for replica in engine.replicas)


async def test_an_engine_that_could_not_be_refitted_beneath_its_adapters_does_not_start(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected

    monkeypatch.setattr("pitstop.engine.vllm_backend.boot.refits_beneath_adapters", lambda: False)
    with pytest.raises(EngineArgumentRejected, match="publish models with their adapters merged in"):
        await launch("llama", 0, **LORA).__aenter__()


async def test_an_engine_that_was_launched_without_adapters_says_how_to_launch_it(launch: Launch) -> None:
    async with launch("llama", 0) as engine:
        with pytest.raises(errors.UnsupportedPolicy, match="enable_lora"):
            await engine.refit_adapter("math", adapter(1), CONFIG, weight_version=1)
        assert engine.adapters == {}
