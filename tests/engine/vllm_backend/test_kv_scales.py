"""Which versions may bring scales of an FP8 KV cache that their checkpoint lacks."""

from __future__ import annotations

from typing import Any

import pytest

from pitstop.engine.errors import MissingTensors, ShapeMismatch, UnexpectedTensors
from pitstop.engine.refit import route
from pitstop.engine.vllm_backend.kv_scales import optional_scales
from pitstop.engine.worker_ports import Inventory, Offer, TensorSpec

WEIGHTS = tuple(
    TensorSpec(f"model.layers.{n}.self_attn.{part}.weight", "float32", (2, 2))
    for n in (0, 1) for part in ("q_proj", "o_proj")
)  # fmt: skip
CONFIG = {"quantization_config": {"quant_method": "compressed-tensors"}}
SCALES = [[f"model.layers.{n}.self_attn.{kind}_scale" for n in (0, 1) for kind in kinds] for kinds in ("kv", "q")]


def offered(*names: str, shape: tuple[int, ...] = (1,)) -> Offer:
    return Offer("r", 1, (*WEIGHTS, *(TensorSpec(name, "float32", shape) for name in names)))


def test_an_engine_that_takes_scales_and_has_none_of_its_own_lets_a_version_bring_them() -> None:
    groups = optional_scales(WEIGHTS, CONFIG, "fp8")
    assert [[spec.name for spec in group] for group in groups] == SCALES
    inventory = Inventory(WEIGHTS, optional=groups)
    assert len(route(offered(), inventory).rows) == 4
    assert len(route(offered(*SCALES[0]), inventory).rows) == 8
    assert len(route(offered(*SCALES[1], *SCALES[0]), inventory).rows) == 10
    assert route(offered(f"module.{SCALES[1][0]}", SCALES[1][1]), inventory).rows[-2].spec.name == SCALES[1][0]


@pytest.mark.parametrize(
    ("tensors", "config", "cache"),
    [
        (WEIGHTS, CONFIG, "auto"),
        (WEIGHTS, CONFIG, "fp8_ds_mla"),
        (WEIGHTS, {}, "fp8"),
        (WEIGHTS, {"quantization_config": {"quant_method": "awq"}}, "fp8"),
        ((*WEIGHTS, TensorSpec(SCALES[0][0], "float32", (1,))), CONFIG, "fp8"),
        ((*WEIGHTS, TensorSpec("model.layers.0.self_attn.k_proj.k_scale", "float32", ())), CONFIG, "fp8"),
    ],
    ids=["no fp8 cache", "scales in the cache", "not quantised", "no scales to load", "its own", "its own elsewhere"],
)
def test_others_refuse_them_by_name(tensors: tuple[TensorSpec, ...], config: dict[str, Any], cache: str) -> None:
    groups = optional_scales(tensors, config, cache)
    assert groups == ()
    with pytest.raises(UnexpectedTensors, match=r"model\.layers\.0\.self_attn\.q_scale"):
        route(offered(*SCALES[1]), Inventory(WEIGHTS, optional=groups))


def test_half_of_them_is_refused_and_the_other_half_named() -> None:
    inventory = Inventory(WEIGHTS, optional=optional_scales(WEIGHTS, CONFIG, "fp8_e4m3"))
    with pytest.raises(MissingTensors, match=r"1 tensors of the model are missing.*layers\.1\.self_attn\.v_scale"):
        route(offered(*SCALES[0][:-1]), inventory)
    with pytest.raises(ShapeMismatch, match="not \\[1\\]"):
        route(offered(*SCALES[1], shape=(2,)), inventory)
