"""Adapters merged on the way out: what is sent is what the trained model computes, and anything else is refused."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pitstop.engine.errors import AdapterRejected, LocalError, MergeUnproven, OfferRejected
from pitstop.transports import merged, merged_tensors, merging, tensor_source
from pitstop.transports.adapters import Delta
from pitstop.transports.buckets import cut
from pitstop.transports.digest import reference
from pitstop.transports.merging import MergedSource, merge
from pitstop.transports.packing import Slot, Source
from pitstop.transports.segment import Mapping, Segment
from pitstop.transports.sources import device_of, source_of
from tests.transports.test_sources import raw, same, sent
from tests.transports.wrapped import ROOT, Small, Wrapped, tuned

NAMES = [
    "embed.weight", "proj.weight", "proj.bias", "conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight",
]  # fmt: skip


def layers(model: Wrapped) -> Any:
    return model.base_model.model


def snapshot(model: nn.Module) -> dict[str, bytes]:
    return {name: raw(value) for name, value in model.state_dict().items()}


def loaded(found: dict[str, Tensor]) -> Small:
    """Load what was sent into a model that has never seen an adapter."""
    plain = Small().to(found["norm.weight"].dtype)
    plain.load_state_dict(found)
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_sent_computes_what_the_trained_model_computes_and_the_trainers_model_is_not_touched(
    dtype: torch.dtype,
) -> None:
    model = tuned(dtype=dtype)
    before = snapshot(model)
    found = sent(source_of(model))
    assert list(found) == NAMES
    plain, trained = loaded(found), layers(model)
    words, x, y = torch.arange(37), torch.randn(9, 16, dtype=dtype), torch.randn(9, 24, dtype=dtype)
    with torch.no_grad():
        for now, wanted in (
            (plain.embed(words), trained.embed(words)),
            (plain.proj(x), trained.proj(x)),
            (plain.conv(y), trained.conv(y)),
            (plain.head(x), trained.head.modules_to_save["default"](x)),
        ):
            torch.testing.assert_close(now, wanted.to(dtype), rtol=1e-4, atol=1e-4)
            assert now.abs().max() > 0.1
    assert snapshot(model) == before


def test_the_sum_is_rounded_once_to_the_dtype_of_the_tensor_however_the_pair_is_stored() -> None:
    model = tuned(dtype=torch.bfloat16)
    found = sent(source_of(model))
    layer = layers(model).proj
    exact = (
        layer.base_layer.weight.double()
        + (8 / math.sqrt(4)) * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    assert found["proj.weight"].dtype == torch.bfloat16
    assert raw(found["proj.weight"]) == raw(exact.to(torch.bfloat16))
    assert raw(found["proj.weight"]) != raw(layer.base_layer.weight)


def test_a_tensor_is_the_same_in_whatever_blocks_it_is_merged_and_in_whatever_parts_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_of(tuned())
    whole = sent(source)
    monkeypatch.setattr(merging, "_ELEMENTS", 50)
    same(sent(source_of(tuned())), whole)
    same(in_buckets(source_of(tuned()), 512), whole)
    assert isinstance(source, MergedSource)
    same({spec.name: tensor for spec, tensor in source.tensors()}, whole)


def in_buckets(source: Source, nbytes: int) -> dict[str, Tensor]:
    """Read a source a bucket at a time, and check the sums of the parts' digests."""
    specs = source.specs()
    segment = Segment(nbytes)
    write, read = Mapping(segment.path, nbytes, "write"), Mapping(segment.path, nbytes, "read")
    segment.close()
    found = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    sums = np.zeros(len(specs), np.uint64)
    for bucket in cut(specs, nbytes):
        digests = np.zeros(len(bucket), np.uint64)
        slots = [Slot(p.row, specs[p.row].dtype, p.offset, p.start, p.count) for p in bucket]
        for _ in source.pack(slots, write, digests):
            pass
        np.add.at(sums, [p.row for p in bucket], digests)
        for p in bucket:
            flat = found[specs[p.row].name].view(-1)
            flat[p.start : p.start + p.count] = read.tensor(specs[p.row].dtype, (p.count,), p.offset)
    for spec, value in zip(specs, sums.tolist(), strict=True):
        assert value == reference(raw(found[spec.name]), found[spec.name].element_size()), spec.name
    return found


def test_a_merge_goes_to_the_dtype_that_the_engine_asks_for() -> None:
    found = sent(source_of(tuned()), {"proj.weight": "bfloat16", "embed.weight": "bfloat16"})
    exact = sent(source_of(tuned()))
    for name in ("proj.weight", "embed.weight"):
        assert raw(found[name]) == raw(exact[name].to(torch.bfloat16))


def test_one_merged_tensor_at_a_time_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = merging.merging, list[weakref.ref[Tensor]]()

    def watched(*arguments: Any) -> Generator[int, None, Tensor]:
        assert not any(one() is not None for one in made)
        tensor = yield from real(*arguments)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(merging, "merging", watched)
    sent(source_of(tuned()))
    in_buckets(source_of(tuned()), 512)
    assert len(made) == 6


def test_what_is_merged_is_not_offered_as_something_that_lies_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_source, "_device", lambda _: "cuda:0")
    assert device_of(source_of({"w": torch.ones(1)})) == "cuda:0"
    source = source_of(tuned())
    assert isinstance(source, MergedSource)
    assert device_of(source) == ""
    with pytest.raises(OfferRejected, match="merged as it is sent"):
        source.lendable([Slot(0, "float32", 0)])


@pytest.mark.parametrize("piece", ["module.", "_orig_mod.", "_fsdp_wrapped_module."])
def test_wrappers_around_and_within_a_wrapped_model_do_not_hide_its_adapters(piece: str) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.add_module(piece.strip("."), inner)

    model = tuned()
    wanted = sent(source_of(model))
    layers(model).proj = Around(layers(model).proj)
    from pitstop.engine.naming import plain

    found = sent(source_of(Around(model)))
    same({plain(name): value for name, value in found.items()}, wanted)


# -- which adapter -------------------------------------------------------------------------------------------


def test_of_several_adapters_one_must_be_named_and_the_others_add_nothing() -> None:
    model = tuned("math", "code")
    with pytest.raises(AdapterRejected, match=r"2 adapters \(code, math\).*merged\(model, adapter="):
        source_of(model)
    one, other = sent(source_of(merged(model, adapter="math"))), sent(source_of(merged(model, adapter="code")))
    layer = layers(model).proj
    for name, found in (("math", one), ("code", other)):
        exact = layer.base_layer.weight.double() + layer.scaling[name] * (
            layer.lora_B[name].weight.double() @ layer.lora_A[name].weight.double()
        )
        assert raw(found["proj.weight"]) == raw(exact.float())
        assert raw(found["head.weight"]) == raw(layers(model).head.modules_to_save[name].weight)
    with pytest.raises(AdapterRejected, match="no adapter 'maths', but code, math"):
        merged(model, adapter="maths")


def test_a_layer_that_an_adapter_does_not_have_is_sent_as_it_is() -> None:
    model = tuned("math")
    layers(model).proj.add("code", 2, 2.0)
    found = sent(source_of(merged(model, adapter="code")))
    assert raw(found["embed.weight"]) == raw(layers(model).embed.base_layer.weight)
    assert raw(found["head.weight"]) == raw(layers(model).head.original_module.weight)
    assert raw(found["proj.weight"]) != raw(layers(model).proj.base_layer.weight)


def test_what_was_merged_in_place_is_not_merged_again() -> None:
    model = tuned()
    wanted = sent(source_of(model))
    for layer in (layers(model).proj, layers(model).embed, layers(model).conv):
        layer.merged_adapters = ["default"]
        name = next(n for n, m in layers(model).named_modules() if m is layer)
        layer.base_layer.weight.data = wanted[f"{name}.weight"].clone()
    same(sent(source_of(model)), wanted)
    layers(model).proj.merged_adapters = ["default", "other"]
    with pytest.raises(AdapterRejected, match=r"proj was merged in place with default, other: unmerge it"):
        source_of(model)


# -- refusals ------------------------------------------------------------------------------------------------


def _dora(layer: Any) -> None:
    layer.use_dora["default"] = True


def _dora_vector(layer: Any) -> None:
    layer.lora_magnitude_vector["default"] = nn.Linear(1, 24)


def _variant(layer: Any) -> None:
    layer.lora_variant["default"] = object()


def _bias(layer: Any) -> None:
    layer.lora_bias["default"] = True


def _disabled(layer: Any) -> None:
    layer.disable_adapters = True


def _alone(layer: Any) -> None:
    del layer.lora_B["default"]


def _headless(layer: Any) -> None:
    del layer.lora_A["default"]


def _shape(layer: Any) -> None:
    layer.lora_B["default"] = nn.Linear(4, 23, bias=False)


def _ranks(layer: Any) -> None:
    layer.lora_B["default"] = nn.Linear(5, 24, bias=False)


def _quantised(layer: Any) -> None:
    layer.base_layer.weight = nn.Parameter(torch.zeros(24, 16, dtype=torch.uint8), requires_grad=False)


def _unscaled(layer: Any) -> None:
    layer.scaling.clear()


def _wild(layer: Any) -> None:
    layer.scaling["default"] = math.inf


def _homeless(layer: Any) -> None:
    layer.base_layer = nn.Identity()


def _kind(layer: Any) -> None:
    del layer.lora_A


def _other_kind(layer: Any) -> None:
    layer.lora_E = nn.ParameterDict()


def _parameter(layer: Any) -> None:
    layer.parameter_name = "gate_up_proj"


REFUSED: dict[Callable[[Any], None], str] = {
    _dora: "DoRA", _dora_vector: "DoRA", _variant: "variant", _bias: "bias", _disabled: "disabled",
    _alone: "lora_A without its lora_B", _headless: "lora_B without its lora_A",
    _shape: r"is \(24, 16\), and its adapter is for \(23, 16\)", _ranks: "no pair of matrices",
    _quantised: "uint8", _unscaled: "how it is scaled", _wild: "scaled by inf", _homeless: "no proj.weight",
    _kind: "Tuned, which is no LoRA layer", _other_kind: "no LoRA layer", _parameter: "gate_up_proj",
}  # fmt: skip


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__.strip("_"))
def test_what_cannot_be_merged_is_refused_and_its_layer_named(spoil: Callable[[Any], None]) -> None:
    model = tuned()
    spoil(layers(model).proj)
    with pytest.raises(AdapterRejected, match=f"(?s)proj.*{REFUSED[spoil]}") as caught:
        source_of(model)
    assert "proj" in str(caught.value.fields["tensor"])
    assert isinstance(caught.value, OfferRejected)


def test_a_wrapped_models_parameters_without_the_model_are_refused_with_what_to_do() -> None:
    with pytest.raises(AdapterRejected, match=r"embed.lora_embedding_A.default is an adapter's: publish the model"):
        source_of(tuned().named_parameters())


# -- by name, without a model --------------------------------------------------------------------------------

CONFIG = {"r": 4, "lora_alpha": 8}


def files(model: Wrapped) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return base and adapter as their files have them."""
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    adapter = {k.replace(".default", ""): v for k, v in state.items() if "lora_" in k}
    adapter[f"{ROOT}head.weight"] = state[f"{ROOT}head.modules_to_save.default.weight"]
    base = {
        k.removeprefix(ROOT).replace(".base_layer", "").replace(".original_module", ""): v
        for k, v in state.items()
        if "lora_" not in k and "modules_to_save" not in k
    }
    return base, adapter


def linear(*, seed: int = 0) -> Wrapped:
    """Return a model whose adapters a file's config can tell: no layer in another orientation, one scaling."""
    model = tuned(seed=seed)
    layers(model).conv = layers(model).conv.base_layer
    layers(model).proj.scaling["default"] = 2.0
    return model


def test_an_adapter_from_its_file_gives_what_the_wrapped_model_gives() -> None:
    base, adapter = files(linear())
    assert list(base) == NAMES
    same(sent(source_of(merged_tensors(base, adapter, CONFIG))), sent(source_of(linear())))
    same(sent(source_of(merged_tensors(base.items(), iter(adapter.items()), CONFIG))), sent(source_of(linear())))


def test_the_scaling_is_what_the_config_says() -> None:
    base, adapter = files(linear())
    wide = {"r": 1, "lora_alpha": 1, "rank_pattern": {"proj": 4, "^embed": 4}, "alpha_pattern": {"proj|embed": 8}}
    same(sent(source_of(merged_tensors(base, adapter, wide))), sent(source_of(linear())))
    model = linear()
    for layer in (layers(model).proj, layers(model).embed):
        layer.scaling["default"] = 8 / math.sqrt(4)
    rooted = sent(source_of(merged_tensors(base, adapter, {**CONFIG, "use_rslora": True})))
    same(rooted, sent(source_of(model)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"r": 0}, "no scaling"),
        ({"lora_alpha": None}, "no scaling"),
        ({"fan_in_fan_out": True}, r"is \(24, 16\), and its adapter is for \(16, 24\)"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(AdapterRejected, match=why):
        merged_tensors(*files(linear()), {**CONFIG, **change})


def test_an_adapter_that_belongs_to_another_model_is_refused_by_name_with_what_it_may_have_meant() -> None:
    base, adapter = files(linear())
    stray = {name.replace("proj", "projj"): value for name, value in adapter.items()}
    with pytest.raises(AdapterRejected, match=r"projj has an adapter.*did you mean proj.weight"):
        merged_tensors(base, stray, CONFIG)
    with pytest.raises(AdapterRejected, match=r"heads.weight.*did you mean head.weight"):
        merged_tensors(base, adapter | {f"{ROOT}heads.weight": base["head.weight"]}, CONFIG)
    with pytest.raises(AdapterRejected, match=r"head.weight is \(37, 16\), and the adapter's own is \(36, 16\)"):
        merged_tensors(base, adapter | {f"{ROOT}head.weight": base["head.weight"][1:]}, CONFIG)
    with pytest.raises(AdapterRejected, match="give one adapter"):
        merged_tensors(base, adapter | {f"{ROOT}proj.lora_A.other.weight": torch.randn(4, 16)}, CONFIG)
    with pytest.raises(AdapterRejected, match=r"module.proj.weight is there twice"):
        merged_tensors(base | {"module.proj.weight": base["proj.weight"]}, adapter, CONFIG)
    with pytest.raises(AdapterRejected, match="DoRA"):
        merged_tensors(base, adapter | {f"{ROOT}proj.lora_magnitude_vector": torch.randn(24)}, CONFIG)
    with pytest.raises(AdapterRejected, match="bias"):
        merged_tensors(base, adapter | {f"{ROOT}proj.lora_B.bias": torch.randn(24)}, CONFIG)


# -- the proof -----------------------------------------------------------------------------------------------


def pair(rows: int, columns: int, scaling: float = 2.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Delta]:
    made = torch.Generator().manual_seed(3)
    return (
        torch.randn(rows, columns, generator=made).to(dtype),
        Delta(torch.randn(rows, 4, generator=made), torch.randn(4, columns, generator=made), scaling),
    )


WRONG: dict[str, Callable[..., Tensor]] = {
    "nothing added": lambda had, up, down: had.clone(),
    "scaled wrong": lambda had, up, down: had + 0.98 * up @ down,
    "added twice": lambda had, up, down: had + 2 * up @ down,
    "transposed": lambda had, up, down: had + (up @ down).T,
    "one value off": lambda had, up, down: (had + up @ down).index_put(
        (torch.tensor(5), torch.tensor(7)), had[5, 7] + 9
    ),
    "a row of another": lambda had, up, down: (had + up @ down)[torch.tensor([1, 0, *range(2, len(had))])],
}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_merge_that_is_not_what_the_adapter_adds_is_found_and_its_tensor_named(
    monkeypatch: pytest.MonkeyPatch, how: str, dtype: torch.dtype
) -> None:
    tensor, delta = pair(64, 64, dtype=dtype)
    merge("right", tensor, delta)
    monkeypatch.setattr(merging, "add", WRONG[how])
    with pytest.raises(MergeUnproven, match=r"layer.weight.*not what the adapter computes") as caught:
        merge("layer.weight", tensor, delta)
    assert caught.value.fields["tensor"] == "layer.weight"
    assert isinstance(caught.value, LocalError)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4097), (4097, 3), (0, 8)])
def test_a_merge_that_is_right_is_never_taken_for_a_wrong_one(
    dtype: torch.dtype, size: float, shape: tuple[int, int]
) -> None:
    tensor, delta = pair(*shape, scaling=size, dtype=dtype)
    wanted = tensor.double() + delta.scaling * (delta.up.double() @ delta.down.double())
    if not bool(torch.isfinite(wanted.to(dtype)).all()):
        with pytest.raises(MergeUnproven, match="not finite"):
            merge("w", tensor, delta)
        return
    torch.testing.assert_close(merge("w", tensor, delta), wanted.to(dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["base", "up", "down"])
def test_values_that_are_not_finite_are_not_sent(value: float, where: str) -> None:
    tensor, delta = pair(8, 8)
    {"base": tensor, "up": delta.up, "down": delta.down}[where][0, 0] = value
    with pytest.raises(MergeUnproven, match=r"w, with its adapter.*not finite"):
        merge("w", tensor, delta)


@pytest.mark.parametrize("size", [1e-7, 1e-40, 1e-310])
def test_what_the_rounding_of_the_smallest_values_takes_away_is_not_taken_for_a_wrong_merge(size: float) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor, delta = pair(64, 64, scaling=size)
        merge("w", (tensor.double() * size).to(dtype), delta)


def test_a_merge_that_would_leave_the_range_of_its_dtype_is_not_sent() -> None:
    tensor, delta = pair(8, 8, scaling=1e6, dtype=torch.float16)
    with pytest.raises(MergeUnproven, match="not finite"):
        merge("w", tensor, delta)
