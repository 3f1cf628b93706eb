"""Scales of an FP8 KV cache travel with a version and are what a fresh engine would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from tests.checkpoints import LAYERS, tensors, write
from tests.vllm.conftest import Garage
from tests.vllm.harness import Replica

if TYPE_CHECKING:
    from torch import Tensor

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
QUANTIZED = {
    "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
    "kv_cache_scheme": SCHEME, "quantization_status": "frozen",
}  # fmt: skip


def version(seed: int, form: str = "self_attn.{}_scale") -> dict[str, Tensor]:
    """A version with scales that are its own."""
    import torch

    scales = {
        f"model.layers.{layer}.{form.format(kind)}": torch.tensor([0.5 + seed + layer / 4 + n / 8])
        for layer in range(LAYERS)
        for n, kind in enumerate("kvq")
    }
    return {**tensors("llama", seed), **scales}


def checkpoint(folder: Path, content: dict[str, Tensor], quantization: dict[str, Any] | None = QUANTIZED) -> Path:
    from safetensors.torch import save_file

    write(folder, "llama", 0)
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file(content, folder / "model.safetensors")
    return folder


async def scales(replica: Replica) -> dict[str, list[float]]:
    """Return every form in which the attention layers of a live model hold their scales."""

    def read(worker: Any) -> dict[str, list[float]]:
        found = {}
        for name, layer in worker.get_model().named_modules():
            if hasattr(layer, "_k_scale"):
                for kind in ("_k_scale", "_v_scale", "_q_scale"):
                    host = getattr(layer, f"{kind}_cpu", None)
                    found[f"{name}.{kind}"] = [
                        float(getattr(layer, kind)), float(getattr(layer, f"{kind}_float")),
                        -1.0 if host is None else float(host),
                    ]  # fmt: skip
        return found

    assert replica.backend._life is not None
    answer: list[dict[str, list[float]]] = await replica.backend._life.llm.collective_rpc(cloudpickle.dumps(read))
    return answer[0]


PLAIN: dict[str, Any] = {"worker_cls": "tests.vllm.plain_worker.PlainWorker"}


@pytest.mark.parametrize("more", [{}, PLAIN], ids=["packed", "plain"])
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
async def test_scales_are_those_of_a_fresh_engine_after_a_refit_and_the_way_back_is_exact(
    garage: Garage, tmp_path: Path, in_place: bool, more: dict[str, Any]
) -> None:
    first, second = (checkpoint(tmp_path / f"v{seed}", version(seed)) for seed in (0, 1))
    fresh = await garage.start(model=second, kv_cache_dtype="fp8", **more)
    wanted, tokens = await scales(fresh), (await fresh.run())[:2]
    live = await garage.start(model=first, kv_cache_dtype="fp8", **more)
    before, old = await scales(live), (await live.run())[:2]
    assert before["model.layers.1.self_attn.attn._k_scale"][:2] == [0.75, 0.75]
    assert {value[0] for value in before.values()}.isdisjoint({value[0] for value in wanted.values()})
    refit = live.refit_in_place if in_place else live.refit
    await refit(version(1))
    assert await scales(live) == wanted
    assert (await live.run(salt="w1"))[:2] == tokens
    await refit(version(0))
    assert await scales(live) == before
    assert (await live.run(salt="w2"))[:2] == old


@pytest.mark.parametrize("form", ["self_attn.attn.{}_scale", "{}_proj"])
async def test_scales_under_other_names_of_checkpoints_land_in_the_same_place(
    garage: Garage, tmp_path: Path, form: str
) -> None:
    def named(seed: int) -> dict[str, Tensor]:
        if form != "{}_proj":
            return version(seed, form)
        content = version(seed)
        return {name.replace("self_attn.k_s", "self_attn.k_proj.k_s").replace("self_attn.v_s", "self_attn.v_proj.v_s"):
                tensor for name, tensor in content.items() if not name.endswith("q_scale")}  # fmt: skip

    first, second = (checkpoint(tmp_path / f"v{seed}", named(seed)) for seed in (0, 1))
    wanted = await scales(await garage.start(model=second, kv_cache_dtype="fp8"))
    live = await garage.start(model=first, kv_cache_dtype="fp8")
    before = await scales(live)
    await live.refit(named(1))
    assert await scales(live) == wanted
    assert wanted["model.layers.0.self_attn.attn._v_scale"][0] == 1.625
    await live.refit(named(0))
    assert await scales(live) == before


@pytest.mark.parametrize("more", [{}, PLAIN], ids=["packed", "plain"])
async def test_scales_that_a_checkpoint_lacks_hold_for_the_version_that_brings_them(
    garage: Garage, tmp_path: Path, more: dict[str, Any]
) -> None:
    live = await garage.start(model=checkpoint(tmp_path / "v0", tensors("llama", 0)), kv_cache_dtype="fp8", **more)
    plain, old = await scales(live), (await live.run())[:2]
    assert {value[0] for value in plain.values()} == {1.0}
    optional = [spec.name for group in live.booted.inventory.optional for spec in group]
    assert set(optional) == version(1).keys() - tensors("llama", 1).keys()
    wanted = await scales(await garage.start(model=checkpoint(tmp_path / "v1", version(1)), kv_cache_dtype="fp8"))
    for _ in range(2):
        await live.refit(version(1))
        assert await scales(live) == wanted
        await live.refit(tensors("llama", 0))
        assert await scales(live) == plain
    assert (await live.run(salt="w2"))[:2] == old


async def test_nothing_of_old_scales_is_left_by_a_refit_whatever_became_of_them_before(
    garage: Garage, tmp_path: Path
) -> None:
    """As after a sleep that discards weights, which the CPU cannot do."""

    def spoil(worker: Any) -> None:
        for layer in worker.get_model().modules():
            if hasattr(layer, "_k_scale"):
                for kind in ("_k_scale", "_v_scale", "_q_scale"):
                    getattr(layer, kind).data.fill_(77.0)
                    setattr(layer, f"{kind}_float", 77.0)
                    if hasattr(layer, f"{kind}_cpu"):
                        getattr(layer, f"{kind}_cpu").fill_(77.0)

    live = await garage.start(model=checkpoint(tmp_path / "v0", version(0)), kv_cache_dtype="fp8")
    before, whole = await scales(live), await live.fingerprint()
    assert live.backend._life is not None
    await live.backend._life.llm.collective_rpc(cloudpickle.dumps(spoil))
    spoiled = await live.fingerprint()
    assert {name for name in whole[0] or {} if (whole[0] or {})[name] != (spoiled[0] or {})[name]} == set(before)
    await live.refit(version(0))
    assert await scales(live) == before
    assert await live.fingerprint() == whole
