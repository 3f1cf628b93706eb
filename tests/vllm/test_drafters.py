"""Drafters are refitted with their targets: after it, both are what an engine has that was started from both anew."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from pitstop.engine.counters import Acceptance
from pitstop.engine.errors import CheckpointUnreadable, MissingTensors, TiedTensorsDiffer
from pitstop.engine.vllm_backend import plan
from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected
from tests import checkpoints, draft_checkpoints
from tests.draft_checkpoints import MTP_LAYER
from tests.vllm.conftest import Garage
from tests.vllm.harness import Replica

if TYPE_CHECKING:
    from torch import Tensor

LONG = 30


@pytest.fixture(scope="module", autouse=True)
def _preloaded(preloaded: None) -> None:
    import vllm.model_executor.models.deepseek_mtp
    import vllm.model_executor.models.deepseek_v2
    import vllm.model_executor.models.glm4_moe
    import vllm.model_executor.models.glm4_moe_mtp
    import vllm.model_executor.models.llama_eagle3
    import vllm.model_executor.models.mimo
    import vllm.model_executor.models.mimo_mtp
    from vllm import ModelRegistry

    models = vllm.model_executor.models
    ModelRegistry.register_model("Glm4MoeForCausalLM", models.glm4_moe.Glm4MoeForCausalLM)
    ModelRegistry.register_model("DeepseekV3ForCausalLM", models.deepseek_v2.DeepseekV3ForCausalLM)
    ModelRegistry.register_model("DeepSeekMTPModel", models.deepseek_mtp.DeepSeekMTP)
    ModelRegistry.register_model("MiMoForCausalLM", models.mimo.MiMoForCausalLM)
    ModelRegistry.register_model("MiMoMTPModel", models.mimo_mtp.MiMoMTP)
    ModelRegistry.register_model("Glm4MoeMTPModel", models.glm4_moe_mtp.Glm4MoeMTP)
    ModelRegistry.register_model("Eagle3LlamaForCausalLM", models.llama_eagle3.Eagle3LlamaForCausalLM)


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"draft.{name}": tensor for name, tensor in tensors.items() if name != "t2d"}


@dataclass
class Pair:
    """A target and its drafter: where they lie, what a trainer publishes, how vLLM is asked for them."""

    target: Path
    tensors: dict[str, Tensor]
    speculative: dict[str, Any]


def eagle3(folder: Path, seed: int, draft: int | None = None) -> Pair:
    draft = seed if draft is None else draft
    own = draft_checkpoints.write_eagle3(folder / f"eagle3-{draft}", draft)
    return Pair(
        checkpoints.write(folder / f"llama-{seed}", "llama", seed),
        checkpoints.tensors("llama", seed) | _prefixed(draft_checkpoints.eagle3_tensors(draft)),
        {"method": "eagle3", "model": str(own), "num_speculative_tokens": 2},
    )


def twin(folder: Path, seed: int, draft: int | None = None) -> Pair:
    """A drafter that is the target once more, so that all its drafts are accepted."""
    draft = seed if draft is None else draft
    own = checkpoints.write(folder / f"twin-{draft}", "llama", draft)
    return Pair(
        checkpoints.write(folder / f"llama-{seed}", "llama", seed),
        checkpoints.tensors("llama", seed) | _prefixed(checkpoints.tensors("llama", draft)),
        {"method": "draft_model", "model": str(own), "num_speculative_tokens": 2},
    )


def mtp(folder: Path, seed: int) -> Pair:
    return Pair(
        draft_checkpoints.write_mtp(folder / f"mtp-{seed}", seed),
        draft_checkpoints.mtp_tensors(seed),
        {"method": "mtp", "num_speculative_tokens": 1},
    )


def mimo(folder: Path, seed: int) -> Pair:
    tensors = draft_checkpoints.mimo_tensors(seed)
    target = draft_checkpoints.write(folder / f"mimo-{seed}", draft_checkpoints.mimo_config(), tensors)
    return Pair(target, tensors, {"method": "mtp", "num_speculative_tokens": 1})


def deepseek(folder: Path, seed: int) -> Pair:
    """A drafter of two layers, both of which vLLM wants to see whenever it loads any."""
    tensors = draft_checkpoints.mtp_tensors(seed, latent=True, behind=2)
    config = draft_checkpoints.mtp_config(latent=True, behind=2)
    target = draft_checkpoints.write(folder / f"deepseek-{seed}", config, tensors)
    return Pair(target, tensors, {"method": "mtp", "num_speculative_tokens": 2})


KINDS: dict[str, Callable[[Path, int], Pair]] = {"eagle3": eagle3, "twin": twin, "mtp": mtp, "mimo": mimo}


async def start(garage: Garage, pair: Pair, *, drafter: str | None = "trained", **more: Any) -> Replica:
    return await garage.start(model=pair.target, speculative_config=pair.speculative, drafter=drafter, **more)


async def drafted(live: Replica) -> list[str]:
    await live.ask("receive", "drafted", live.tickets("drafted", {}, token="drafted"))
    found = await live.hear()
    assert all(len(said) == 64 for said in found), found
    await live.ask("release", "drafted")
    await live.heard("closed")
    return found


async def ran(live: Replica, salt: str) -> tuple[list[int], list[float], Acceptance | None]:
    """Return the tokens and logprobs of a request, and how its drafts fared."""
    before = await live.backend.counters()
    made = await live.run(salt=salt, max_tokens=LONG)
    return made.token_ids, made.logprobs, (await live.backend.counters()).since(before).acceptance()


async def state(live: Replica, salt: str) -> tuple[Any, ...]:
    """Return all that tells one pair's weights from another's, the copies that vLLM packs included."""
    return await live.fingerprint(), await drafted(live), *await ran(live, salt)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pair_is_what_a_fresh_engine_has_after_each_refit_and_back(
    garage: Garage, tmp_path: Path, kind: str
) -> None:
    zero, one = (KINDS[kind](tmp_path, seed) for seed in (0, 1))
    live, fresh = await start(garage, zero), await start(garage, one)
    old, new = await state(live, "w0"), await state(fresh, "w0")
    assert all(old[n] != new[n] for n in range(4))
    await live.refit(zero.tensors)
    assert await state(live, "w1") == old
    await live.refit(one.tensors)
    assert await state(live, "w2") == new
    await live.refit(zero.tensors)
    assert await state(live, "w3") == old
    for n, groups in enumerate((1, 5, 80)):
        await live.refit_in_place(one.tensors, groups, seed=n)
        assert await state(live, f"new {n}") == new
        await live.refit_in_place(zero.tensors, groups, seed=10 + n)
        assert await state(live, f"old {n}") == old


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mimo", "deepseek"])
async def test_versions_after_the_first_are_copied_into_both_models_and_are_exact(
    garage: Garage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where nothing is packed, as on a GPU; experts are packed here all the same, and stay vLLM's to load."""
    defaults: Any = plan.learn.__kwdefaults__
    monkeypatch.setitem(defaults, "least", 0.0)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    zero, one = ({**KINDS, "deepseek": deepseek}[kind](tmp_path, seed) for seed in (0, 1))
    plain = {"worker_cls": "tests.vllm.plain_worker.PlainWorker"}
    live, fresh = await start(garage, zero, **plain), await start(garage, one, **plain)
    old, new = await state(live, "w0"), await state(fresh, "w0")
    assert (await live.refit(one.tensors)).copied == 0
    assert await state(live, "w1") == new
    for n, (pair, wanted) in enumerate(((zero, old), (one, new), (zero, old))):
        ways = await live.refit(pair.tensors)
        assert ways.copied > len(pair.tensors) / 2, ways
        assert await state(live, f"staged {n}") == wanted
        ways = await live.refit_in_place(pair.tensors, (1, 5, 80)[n], seed=n)
        assert ways.straight > ways.copied / 2, ways
        assert await state(live, f"in place {n}") == wanted


async def test_a_drafter_of_which_vllm_wants_all_layers_at_once_takes_them_in_parts(
    garage: Garage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some versions have no such attention on the CPU.
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    zero, one = deepseek(tmp_path, 0), deepseek(tmp_path, 1)
    live, fresh = await start(garage, zero), await start(garage, one)
    await live.refit_in_place(one.tensors, 80)
    assert await state(live, "w1") == await state(fresh, "w1")


async def test_b41_a_drafter_that_is_its_target_is_accepted_wholly_before_and_after_a_refit(
    garage: Garage, tmp_path: Path
) -> None:
    live = await start(garage, twin(tmp_path, 0))
    for seed in (0, 1, 0):
        await live.refit(twin(tmp_path, seed).tensors)
        *_, found = await ran(live, f"{seed}")
        assert found is not None
        assert (found.rate, found.per_position) == (1.0, {1: 1.0, 2: 1.0})
        assert found.drafts == LONG // 3


async def test_a_frozen_drafter_keeps_what_it_has_and_the_target_moves_on(garage: Garage, tmp_path: Path) -> None:
    pair, mixed = eagle3(tmp_path, 0), eagle3(tmp_path, 1, draft=0)
    live, fresh = await start(garage, pair, drafter=None), await start(garage, mixed)
    assert not any(spec.name.startswith("draft.") for spec in live.booted.inventory.tensors)
    await live.refit(checkpoints.tensors("llama", 1))
    assert await state(live, "w1") == await state(fresh, "w1")


async def test_what_is_left_of_a_frozen_mtp_layer_is_on_disk_only_and_is_read_from_the_files_that_hold_it(
    garage: Garage, tmp_path: Path
) -> None:
    zero, one = draft_checkpoints.mtp_tensors(0), draft_checkpoints.mtp_tensors(1)
    folder = draft_checkpoints.write_mtp(tmp_path / "sharded", 0, shards=6)
    index = (folder / "model.safetensors.index.json").read_text()
    for path in folder.glob("*.safetensors"):
        if not any(path.name in line for line in index.split(",") if f'"{MTP_LAYER}' in line):
            path.unlink()
    assert 0 < len(list(folder.glob("*.safetensors"))) < 6
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    live = await start(garage, Pair(folder, {}, spec), drafter="frozen", load_format="dummy")
    policy = {name: tensor for name, tensor in one.items() if not name.startswith(MTP_LAYER)}
    assert live.booted.weight_version is None
    assert {spec.name for spec in live.booted.inventory.tensors} == set(policy)
    await live.refit(policy)
    layer = {name: tensor for name, tensor in zero.items() if name.startswith(MTP_LAYER)}
    mixed = draft_checkpoints.write(tmp_path / "mixed", draft_checkpoints.mtp_config(), policy | layer)
    fresh = await start(garage, Pair(mixed, {}, spec))
    assert await state(live, "w1") == await state(fresh, "w1")


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
async def test_a_trained_drafter_is_whole_after_a_dummy_start_and_the_first_refit(
    garage: Garage, tmp_path: Path, kind: str
) -> None:
    zero, one = (KINDS[kind](tmp_path, seed) for seed in (0, 1))
    live, fresh = await start(garage, zero, load_format="dummy"), await start(garage, one)
    assert live.booted.weight_version is None
    await live.refit(one.tensors)
    assert await state(live, "w1") == await state(fresh, "w1")


async def test_a_frozen_drafter_with_a_checkpoint_is_whole_after_a_dummy_start_and_the_first_refit(
    garage: Garage, tmp_path: Path
) -> None:
    pair, new = eagle3(tmp_path, 0), eagle3(tmp_path, 1, draft=0)
    live, fresh = await start(garage, pair, drafter="frozen", load_format="dummy"), await start(garage, new)
    assert live.booted.weight_version is None
    await live.refit(checkpoints.tensors("llama", 1))
    assert await state(live, "w1") == await state(fresh, "w1")


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
async def test_after_a_sleep_that_discards_weights_a_frozen_drafter_is_read_again(
    garage: Garage, tmp_path: Path, kind: str
) -> None:
    """Nothing is discarded on the CPU: what shows is that its files are read before the engine runs again."""
    pair = KINDS[kind](tmp_path, 0)
    live, fresh = await start(garage, pair, drafter="frozen"), await start(garage, pair)
    wanted = await state(fresh, "w0")
    folder = Path(pair.speculative.get("model", pair.target))
    away = anyio.Path(folder)
    for level in (1, 2):
        await live.backend.suspend("recompute")
        await live.backend.sleep(level)
        await away.rename(tmp_path / "away")
        with pytest.raises(CheckpointUnreadable) if level == 2 else contextlib.nullcontext():
            await live.backend.wake(kv_cache=False)
        await anyio.Path(tmp_path / "away").rename(folder)
        await live.backend.wake(kv_cache=False)
        await live.backend.wake(kv_cache=True)
        assert await state(live, f"w{level}") == wanted


async def test_a_drafter_without_one_of_its_tensors_is_torn_with_its_target_and_the_next_refit_mends_both(
    garage: Garage, tmp_path: Path
) -> None:
    zero, one = eagle3(tmp_path, 0), eagle3(tmp_path, 1)
    live, fresh = await start(garage, zero), await start(garage, one)
    for name in ("draft.midlayer.mlp.up_proj.weight", "draft.d2t", "model.norm.weight"):
        part = {other: tensor for other, tensor in one.tensors.items() if other != name}
        await live.backend.suspend("recompute")
        assert set(await live.feed("short", part)) == {"landed"}
        with pytest.raises(MissingTensors, match=r"draft_id_to_target_id|gate_up_proj|model\.norm"):
            await live.ask("apply", "short")
        await live.ask("undo", "short")
        await live.ask("release", "short")
        await live.heard("closed")
        await live.backend.resume()
        await live.run(salt=name)
    await live.refit(one.tensors)
    assert await state(live, "w1") == await state(fresh, "w1")


async def test_a_drafters_embedding_that_vllm_took_for_the_targets_must_stay_equal_to_it(
    garage: Garage, tmp_path: Path
) -> None:
    """It was the same at the launch, so that there is one in memory where a version may have two."""
    target = checkpoints.tensors("llama", 0)
    own = {**draft_checkpoints.eagle3_tensors(0), "embed_tokens.weight": target["model.embed_tokens.weight"].clone()}
    pair = eagle3(tmp_path, 0)
    folder = draft_checkpoints.write(tmp_path / "embedding", draft_checkpoints.eagle3_config(), own)
    live = await start(garage, Pair(pair.target, {}, {**pair.speculative, "model": str(folder)}))
    fresh = await start(garage, eagle3(tmp_path, 1, draft=0))
    one = checkpoints.tensors("llama", 1)
    other = one | _prefixed(own)
    await live.land("other", other)
    await live.backend.suspend("recompute")
    await live.ask("apply", "other")
    with pytest.raises(TiedTensorsDiffer, match=r"draft\.embed_tokens\.weight is not what the target has"):
        await live.ask("finalize", "other")
    await live.ask("release", "other")
    await live.heard("closed")
    await live.backend.resume()
    await live.refit(other | {"draft.embed_tokens.weight": one["model.embed_tokens.weight"].clone()})
    assert await state(live, "w1") == await state(fresh, "w1")


async def test_every_rank_refits_its_part_of_both(garage: Garage, tmp_path: Path) -> None:
    zero, one = eagle3(tmp_path, 0), eagle3(tmp_path, 1)
    live, fresh = [await start(garage, pair, tensor_parallel_size=2) for pair in (zero, one)]
    await live.refit(one.tensors)
    assert await state(live, "w1") == await state(fresh, "w1")


async def test_a_drafter_asked_for_in_vain_is_told_of_before_anything_starts(garage: Garage, tmp_path: Path) -> None:
    with pytest.raises(EngineArgumentRejected, match="speculative_config asks for none"):
        await garage.start(drafter="frozen")
    ngram = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}
    with pytest.raises(EngineArgumentRejected, match="speculative_config asks for none"):
        await garage.start(drafter="trained", speculative_config=ngram)
    with pytest.raises(EngineArgumentRejected, match="not 'both'"):
        await garage.start(drafter="both", speculative_config=ngram)
    plain = checkpoints.write(tmp_path / "plain", "llama", 0)
    with pytest.raises(CheckpointUnreadable, match="launch with drafter='frozen'"):
        await start(garage, Pair(plain, {}, {"method": "mtp", "num_speculative_tokens": 1}))
    gone = Pair(plain, {}, {"method": "eagle3", "model": str(tmp_path / "gone"), "num_speculative_tokens": 1})
    shutil.copytree(plain, tmp_path / "gone", ignore=lambda *_: ["model.safetensors"])
    with pytest.raises(CheckpointUnreadable, match="no safetensors"):
        await start(garage, gone)
