"""Every kind of model: after a refit the engine is one that was started from the new checkpoint, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pitstop.engine import Outcome, RolloutEngine, SamplingParams, errors
from pitstop.engine.refit import route
from pitstop.engine.vllm_backend.inventory import from_headers
from pitstop.engine.vllm_backend.meta_model import from_meta_model
from pitstop.engine.worker_ports import Mode, Offer
from pitstop.transports import Buffers
from pitstop.transports.sources import TensorSource
from tests.checkpoints import FAMILIES, ROUTER_BIAS, VOCAB
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch
from tests.e2e.test_refit import greedy
from tests.e2e.test_ring import ring
from tests.e2e.trainer import trainer

if TYPE_CHECKING:
    from torch import Tensor

MODES: tuple[Mode, ...] = ("staged", "in_place")
_known: dict[tuple[str, int, int], Any] = {}


def content(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(path / "model.safetensors"))


async def seen(engine: RolloutEngine) -> Any:
    """What an engine says, and what it holds."""
    return await greedy(engine), await engine.fingerprints()


async def truth(launch: Launch, family: str, seed: int, ranks: int = 1) -> Any:
    """What an engine is that was started from a checkpoint."""
    key = family, seed, ranks
    if key not in _known:
        async with launch(family, seed, tensor_parallel_size=ranks) as fresh:
            _known[key] = await seen(fresh)
    return _known[key]


async def there_and_back(
    engine: RolloutEngine, ways: Iterable[tuple[Mode, Path, Any]], start: int = 0, seed: int = 0
) -> None:
    """Refit as told, each time in another order, and compare what came of it."""
    for version, (mode, path, expected) in enumerate(ways, start + 1):
        named = list(content(path).items())
        Random(version + seed).shuffle(named)
        report = await engine.refit(named, weight_version=version, mode=mode)
        assert (report.outcome, report.mode) == (Outcome.COMMITTED, mode)
        assert await seen(engine) == expected


@pytest.mark.parametrize("family", FAMILIES)
async def test_there_and_back_in_any_order_is_exact_and_the_same_again_changes_nothing(
    launch: Launch, checkpoint: Checkpoint, family: str
) -> None:
    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    old, new = await truth(launch, family, 0), await truth(launch, family, 1)
    assert old[0] != new[0]
    async with launch(family, 0, buffers=ring(t0, 40)) as engine:
        for n, mode in enumerate(MODES):
            ways = ((mode, t0, old), (mode, t1, new), (mode, t1, new), (mode, t0, old))
            await there_and_back(engine, ways, start=4 * n)


@pytest.mark.parametrize("family", FAMILIES)
async def test_it_is_exact_in_few_buckets_too(launch: Launch, checkpoint: Checkpoint, family: str) -> None:
    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    old, new = await truth(launch, family, 0), await truth(launch, family, 1)
    async with launch(family, 0, buffers=ring(t0, 4)) as engine:
        await there_and_back(engine, (("in_place", t1, new), ("staged", t0, old)), seed=4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "glm4_moe"])
async def test_two_ranks_there_and_back(launch: Launch, checkpoint: Checkpoint, family: str) -> None:
    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    new = await truth(launch, family, 1, ranks=2)
    async with launch(family, 0, tensor_parallel_size=2, buffers=ring(t0, 40)) as engine:
        old = await seen(engine)
        await there_and_back(engine, [(mode, *way) for mode in MODES for way in ((t1, new), (t0, old))])


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_module_of_transformers_is_what_its_checkpoint_is(
    launch: Launch, checkpoint: Checkpoint, family: str
) -> None:
    """As it is in memory: experts fused, buffers and tied heads by their names, GPT-2's matrices turned."""
    import torch
    from transformers import AutoModelForCausalLM

    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    old, new = await truth(launch, family, 0), await truth(launch, family, 1)
    model = AutoModelForCausalLM.from_pretrained(t1, dtype=torch.float32)
    async with launch(family, 0, buffers=ring(t0, 1)) as engine:
        await engine.refit(model, weight_version=1, mode="staged")
        assert await seen(engine) == new
        await there_and_back(engine, (("in_place", t0, old),), start=1, seed=1)


async def test_experts_one_by_one_are_refused_where_the_checkpoint_has_them_fused(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    async with launch("qwen3_moe_fused", 0) as engine:
        with pytest.raises(errors.UnexpectedTensors, match=r"publish model\.layers\.0\.mlp\.experts\.\w+, stacked"):
            await engine.refit(checkpoint("qwen3_moe", 1), weight_version=1)
        assert await seen(engine) == await truth(launch, "qwen3_moe_fused", 0)


async def test_experts_of_the_other_orientation_are_refused_before_anything_is_suspended(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    fused = content(checkpoint("qwen3_moe_fused", 1))
    turned = {name: t.transpose(1, 2) if t.dim() == 3 else t for name, t in fused.items()}
    async with launch("qwen3_moe", 0) as engine:
        with pytest.raises(errors.ShapeMismatch, match=r"transpose\(1, 2\)"):
            await engine.refit(turned, weight_version=1)
        straight = {name: t.transpose(1, 2) if t.dim() == 3 else t for name, t in turned.items()}
        assert (await engine.refit(straight, weight_version=2)).outcome is Outcome.COMMITTED


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_without_weights_has_the_inventory_of_its_checkpoint(
    checkpoint: Checkpoint, family: str, dtype: str
) -> None:
    stored = checkpoint("qwen3_moe" if family == "qwen3_moe_fused" else family, 0, dtype=dtype)
    made, read = from_meta_model(stored), from_headers(stored)
    assert {spec.name: spec for spec in made.tensors} == {spec.name: spec for spec in read.tensors}
    assert (made.tied, set(made.vocabulary)) == (read.tied, set(read.vocabulary))


def vision_language(kind: str) -> Any:
    """A tiny model of transformers that sees, with weights."""
    import torch
    from transformers import AutoModelForImageTextToText, Gemma3Config, LlavaConfig, Qwen2_5_VLConfig

    text = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 128, "vocab_size": VOCAB,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    configs: dict[str, Any] = {
        "gemma3": lambda: Gemma3Config(text_config=text, vision_config={**vision, **layers}),
        "llava": lambda: LlavaConfig(text_config={**text, "model_type": "llama"}, vision_config={
            **vision, **layers, "model_type": "clip_vision_model",
        }),
        "qwen2_5_vl": lambda: Qwen2_5_VLConfig(text_config=text, vision_config={
            "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "depth": 1, "num_heads": 2,
        }),
    }  # fmt: skip
    return AutoModelForImageTextToText.from_config(configs[kind](), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen2_5_vl"])
def test_b11_a_vision_language_module_fits_its_checkpoint_though_its_names_are_others(
    tmp_path: Path, kind: str
) -> None:
    model = vision_language(kind)
    model.save_pretrained(tmp_path)
    read, made = from_headers(tmp_path), from_meta_model(tmp_path)
    assert {spec.name: spec for spec in made.tensors} == {spec.name: spec for spec in read.tensors}
    assert (made.tied, set(made.vocabulary)) == (read.tied, set(read.vocabulary))
    source = TensorSource(model.state_dict().items())
    stored = {spec.name for spec in read.tensors}
    assert {spec.name for spec in source.specs()} - stored - read.tied.keys() != set()
    manifest = route(Offer("r", 1, source.specs()), read)
    tensors = dict(model.state_dict())
    saved = content(tmp_path)
    for row in manifest.rows:
        if row.spec.name in stored:
            assert saved[row.spec.name].equal(tensors[source.specs()[row.index].name]), row.spec.name


def half(checkpoint: Checkpoint, family: str, seed: int) -> RolloutEngine:
    return RolloutEngine.launch(
        checkpoint(family, seed, dtype="bfloat16"), start_method="fork",
        engine_args={"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20},
    )  # fmt: skip


async def test_b13_the_biases_of_a_router_stay_fp32_from_end_to_end_in_a_bf16_model(
    checkpoint: Checkpoint, preloaded: None
) -> None:
    import torch

    tensors = content(checkpoint("many_experts", 1, dtype="bfloat16"))
    (name,) = (name for name in tensors if name.endswith(ROUTER_BIAS))
    spread = tensors[name] = torch.linspace(6.82, 7.06, 256)
    assert (len(spread.unique()), len(spread.bfloat16().unique())) == (256, 9)
    async with half(checkpoint, "many_experts", 1) as fresh:
        whole = (await fresh.fingerprints())["replica-0"]
        (live,) = (key for key in whole if key.endswith(ROUTER_BIAS))
        await fresh.refit(
            tensors | {name: content(checkpoint("many_experts", 1, dtype="bfloat16"))[name]}, weight_version=1
        )
        assert (await fresh.fingerprints())["replica-0"] == whole
    async with half(checkpoint, "many_experts", 0) as engine:
        for version, mode in enumerate(MODES):
            await engine.refit(tensors, weight_version=3 * version + 1, mode=mode)
            exact = (await engine.fingerprints())["replica-0"]
            # Masters in fp32 are cast, but for what is fp32 in the checkpoint.
            masters = {key: tensor.float() for key, tensor in tensors.items()}
            await engine.refit(masters, weight_version=3 * version + 2, mode=mode, cast="inventory")
            assert (await engine.fingerprints())["replica-0"] == exact
            rounded = tensors | {name: spread.bfloat16().float()}
            await engine.refit(rounded, weight_version=3 * version + 3, mode=mode)
            lossy = (await engine.fingerprints())["replica-0"]
            assert {key for key in exact if exact[key] != lossy[key]} == {live}
        with pytest.raises(errors.DtypeMismatch, match=f"{ROUTER_BIAS} is bfloat16, not float32"):
            await engine.refit(tensors | {name: spread.bfloat16()}, weight_version=9)


@pytest.mark.parametrize(
    ("family", "embed"), [("gemma3", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
async def test_b15_tied_heads_four_ways(launch: Launch, checkpoint: Checkpoint, family: str, embed: str) -> None:
    old, new = await truth(launch, family, 0), await truth(launch, family, 1)
    tensors = content(checkpoint(family, 1))
    head = tensors[embed]
    without = {name: tensor for name, tensor in tensors.items() if name != embed}
    async with launch(family, 0) as engine:
        with pytest.raises(errors.TiedTensorsDiffer, match="lm_head"):
            await engine.refit(tensors | {"lm_head.weight": head + 1}, weight_version=1)
        assert await seen(engine) == old
        version = 1
        for sent in (tensors, without | {"lm_head.weight": head}, tensors | {"lm_head.weight": head.clone()}):
            for mode in MODES:
                version += 1
                await engine.refit(checkpoint(family, 0), weight_version=version)
                assert await seen(engine) == old
                version += 1
                await engine.refit(sent, weight_version=version, mode=mode)
                assert await seen(engine) == new


@pytest.mark.parametrize("buffers", [None, Buffers(most_nbytes=0, slots=2, slot_nbytes=4096)], ids=["whole", "buckets"])
@pytest.mark.parametrize("family", ["llama", "tied"])
async def test_b79_rows_beyond_the_vocabulary_are_not_sent_if_the_trainer_says_that_they_are_padding(
    launch: Launch, checkpoint: Checkpoint, family: str, buffers: Buffers | None
) -> None:
    import torch

    new = await truth(launch, family, 1)
    padded = {}
    for name, tensor in content(checkpoint(family, 1)).items():
        rows = torch.full((64, tensor.shape[-1]), 1e4)
        padded[name] = torch.cat([tensor, rows]) if name.endswith(("embed_tokens.weight", "lm_head.weight")) else tensor
    async with launch(family, 0, buffers=buffers) as engine:
        with pytest.raises(errors.ShapeMismatch, match='pass vocabulary="trim"'):
            await engine.refit(padded, weight_version=1)
        report = await engine.refit(padded, weight_version=2, vocabulary="trim")
        assert report.nbytes == sum(t.nbytes for t in content(checkpoint(family, 1)).values())
        assert await seen(engine) == new
        hot = SamplingParams(max_tokens=64, temperature=2.0, ignore_eos=True)
        done = [c async for _, c in engine.generate_async([[97 + n] for n in range(4)], hot)]
        assert [c.error for c in done] == [None] * 4
        assert max(token for c in done for token in c.token_ids) < VOCAB
        short = {name: t[: VOCAB - 1] if "embed_tokens" in name else t for name, t in padded.items()}
        with pytest.raises(errors.ShapeMismatch, match=r"is \[319, 64\], not \[320, 64\]"):
            await engine.refit(short, weight_version=3, vocabulary="trim")


@pytest.mark.parametrize("buffers", [None, Buffers(most_nbytes=0, slots=2, slot_nbytes=4096)], ids=["whole", "buckets"])
async def test_a_trainer_of_another_process_sends_parts_too(
    launch: Launch, checkpoint: Checkpoint, buffers: Buffers | None
) -> None:
    t0, t1 = checkpoint("qwen3_moe", 0), checkpoint("qwen3_moe", 1)
    old, new = await truth(launch, "qwen3_moe", 0), await truth(launch, "qwen3_moe", 1)
    async with launch("qwen3_moe", 0, buffers=buffers) as engine:
        with trainer(engine.address) as publisher:
            await publisher.connected()
            assert (await publisher.publish(t1, 1, "fused"))[0] == "committed"
            assert await seen(engine) == new
            assert (await publisher.publish(t0, 2, "padded"))[0] == "shape_mismatch"
            assert await seen(engine) == new
            said = await publisher.publish(t0, 3, "padded", vocabulary="trim")
            assert said[:2] == ("committed", sum(t.nbytes for t in content(t0).values()))
            assert await seen(engine) == old
