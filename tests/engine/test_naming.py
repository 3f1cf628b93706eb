"""Whatever a trainer calls a tensor, it is found, or the offer is refused with both sides' names."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine import errors
from pitstop.engine.naming import common, plain
from pitstop.engine.refit import route
from pitstop.engine.worker_ports import Inventory, Offer, Routed, TensorSpec

TEXT = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight", "norm.weight")
TEXTS = ("model.", "model.language_model.", "language_model.model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
VISUALS = ("visual.", "model.visual.")
TOWERS = (
    "vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.",
)  # fmt: skip


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "bfloat16", shape or (8, 4))


def offer(*tensors: TensorSpec, **more: object) -> Offer:
    return Offer("r", 1, tensors, **more)  # type: ignore[arg-type]


def model(text: str, head: str, vision: str, parts: tuple[str, ...]) -> list[str]:
    """Name a vision-language model's tensors in one of their forms."""
    return [*(text + name for name in TEXT), head, *(vision + part for part in parts)]


def forms(visions: tuple[str, ...], parts: tuple[str, ...]) -> list[list[str]]:
    return [model(text, head, vision, parts) for text in TEXTS for head in HEADS for vision in visions]


@pytest.mark.parametrize(
    "wanted", forms(VISUALS, ("blocks.0.attn.qkv.weight", "merger.mlp.0.bias")), ids=lambda names: " ".join(names[-4:])
)
def test_b11_each_form_of_a_vision_language_models_names_is_each_other_form(wanted: list[str]) -> None:
    for sent in forms(VISUALS, ("blocks.0.attn.qkv.weight", "merger.mlp.0.bias")):
        manifest = route(offer(*map(spec, sent)), Inventory(tuple(map(spec, wanted))))
        assert [(row.index, row.spec.name) for row in manifest.rows] == list(enumerate(wanted))


@pytest.mark.parametrize(
    "wanted", forms(TOWERS, ("encoder.layers.0.mlp.fc1.weight",)), ids=lambda names: " ".join(names[-4:])
)
def test_gemma3s_tower_is_found_with_and_without_the_level_that_was_dropped(wanted: list[str]) -> None:
    extra = "multi_modal_projector.mm_input_projection_weight"
    inventory = Inventory((*map(spec, wanted), spec(extra)))
    for sent in forms(TOWERS, ("encoder.layers.0.mlp.fc1.weight",)):
        manifest = route(offer(*map(spec, sent), spec(f"model.{extra}")), inventory)
        assert [row.spec.name for row in manifest.rows] == [*wanted, extra]


@pytest.mark.parametrize("text", TEXTS)
def test_b11_what_maps_nowhere_is_refused_with_what_is_missing_on_the_other_side(text: str) -> None:
    wanted = model("language_model.model.", HEADS[1], "vision_tower.", ("encoder.weight",))
    sent = model(text, HEADS[0], "visual.", ("encoder.weight",))
    with pytest.raises(errors.UnexpectedTensors) as refused:
        route(offer(*map(spec, sent)), Inventory(tuple(map(spec, wanted))))
    assert "1 offered tensors are not of this model: visual.encoder.weight" in str(refused.value)
    assert "Not offered: vision_tower.encoder.weight." in str(refused.value)


@pytest.mark.parametrize("text", TEXTS)
def test_b11_a_text_trainer_does_not_refit_a_whole_vision_language_model(text: str) -> None:
    wanted = model("language_model.model.", HEADS[1], "vision_tower.", ("encoder.weight",))
    sent = [*(text + name for name in TEXT), HEADS[0]]
    with pytest.raises(errors.MissingTensors, match=r"1 tensors .* missing from the offer: vision_tower\.encoder"):
        route(offer(*map(spec, sent)), Inventory(tuple(map(spec, wanted))))


def test_two_names_of_one_tensor_are_one_too_many() -> None:
    inventory = Inventory((spec("model.norm.weight"),))
    with pytest.raises(errors.RepeatedTensors, match=r"model\.language_model\.norm\.weight, model\.norm\.weight"):
        route(offer(spec("model.norm.weight"), spec("model.language_model.norm.weight")), inventory)


def test_a_rename_that_two_tensors_could_mean_is_not_taken() -> None:
    both = ("model.norm.weight", "language_model.model.norm.weight")
    inventory = Inventory(tuple(map(spec, both)))
    assert [row.spec.name for row in route(offer(*map(spec, both)), inventory).rows] == list(both)
    with pytest.raises(errors.UnexpectedTensors, match=r"model\.language_model\.norm\.weight"):
        route(offer(spec(both[0]), spec("model.language_model.norm.weight")), inventory)


def test_a_tied_head_is_found_by_its_other_form_too() -> None:
    embed, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    inventory = Inventory((spec(embed),), {head: embed})
    sent = offer(spec("model.language_model.embed_tokens.weight"), spec("lm_head.weight"))
    manifest = route(sent, inventory)
    assert ([row.spec.name for row in manifest.rows], manifest.equal) == ([embed, head], ((1, 0),))


@given(st.data())
def test_b25_wrapper_pieces_and_prefixes_come_to_one_name(data: st.DataObject) -> None:
    pieces = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"]
    name = f"{data.draw(st.sampled_from(TEXTS))}{data.draw(st.sampled_from(TEXT))}"
    parts = name.split(".")
    for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=4)):
        parts.insert(data.draw(st.integers(0, len(parts))), piece)
    assert plain(".".join(parts)) == name
    assert common(".".join(parts)) == common(name) == f"model.{name.removeprefix(next_prefix(name))}"
    assert common(common(name)) == common(name)


def next_prefix(name: str) -> str:
    return max((text for text in TEXTS if name.startswith(text)), key=len)


E, INNER, HIDDEN = 3, 6, 4
LAYER = "model.layers.0.mlp"


def experts(
    layer: str = f"{LAYER}.experts", roles: str = "gate_proj up_proj down_proj", inner: int = INNER
) -> Inventory:
    gate, up, down = roles.split()
    stored = []
    for n in range(E):
        stored += [spec(f"{layer}.{n}.{gate}.weight", inner, HIDDEN), spec(f"{layer}.{n}.{up}.weight", inner, HIDDEN)]
        stored.append(spec(f"{layer}.{n}.{down}.weight", HIDDEN, inner))
    return Inventory(tuple(stored))


GATE_UP, DOWN = (
    spec(f"{LAYER}.experts.gate_up_proj", E, 2 * INNER, HIDDEN),
    spec(f"{LAYER}.experts.down_proj", E, HIDDEN, INNER),
)


@pytest.mark.parametrize(
    ("layer", "roles"),
    [
        pytest.param(f"{LAYER}.experts", "gate_proj up_proj down_proj", id="qwen3 moe"),
        pytest.param("model.layers.0.block_sparse_moe.experts", "w1 w3 w2", id="mixtral"),
    ],
)
def test_fused_experts_are_parts_of_a_checkpoint_that_has_them_one_by_one(layer: str, roles: str) -> None:
    gate, up, down = roles.split()
    manifest = route(offer(GATE_UP, DOWN), experts(layer, roles))
    found = {row.spec.name: (row.index, row.start) for row in manifest.rows}
    size = INNER * HIDDEN
    for n in range(E):
        assert found.pop(f"{layer}.{n}.{gate}.weight") == (0, 2 * n * size)
        assert found.pop(f"{layer}.{n}.{up}.weight") == (0, (2 * n + 1) * size)
        assert found.pop(f"{layer}.{n}.{down}.weight") == (1, n * size)
    assert found == {}
    assert manifest.nbytes == GATE_UP.nbytes + DOWN.nbytes


@pytest.mark.parametrize(
    ("inner", "ambiguous"), [(INNER, "neither"), (HIDDEN // 2, "gate and up"), (HIDDEN, "down")], ids=str
)
def test_experts_that_lie_the_other_way_round_are_refused_though_one_of_them_is_square(
    inner: int, ambiguous: str
) -> None:
    gate_up, down = (E, 2 * inner, HIDDEN), (E, HIDDEN, inner)
    straight = [spec(GATE_UP.name, *gate_up), spec(DOWN.name, *down)]
    assert len(route(offer(*straight), experts(inner=inner)).rows) == 3 * E
    turned = [spec(s.name, s.shape[0], s.shape[2], s.shape[1]) for s in straight]
    for both in (turned, turned[::-1]):
        with pytest.raises(errors.ShapeMismatch, match=r"transpose\(1, 2\)"):
            route(offer(*both), experts(inner=inner))


def test_fused_experts_of_another_number_or_without_their_other_half_are_refused() -> None:
    with pytest.raises(errors.ShapeMismatch, match=r"gate_up_proj are \[2, 12, 4\], not \[3, 12, 4\]"):
        route(offer(spec(GATE_UP.name, 2, 2 * INNER, HIDDEN), DOWN), experts())
    with pytest.raises(errors.MissingTensors, match=r"experts\.0\.down_proj\.weight"):
        route(offer(GATE_UP), experts())
    with pytest.raises(errors.RepeatedTensors, match=r"experts\.1\.up_proj\.weight"):
        route(offer(GATE_UP, DOWN, spec(f"{LAYER}.experts.1.up_proj.weight", INNER, HIDDEN)), experts())


@pytest.mark.parametrize("absent", ["experts.1.", "gate_proj", "down_proj"])
def test_fused_experts_are_no_parts_of_a_checkpoint_that_lacks_some(absent: str) -> None:
    stored = tuple(found for found in experts().tensors if absent not in found.name)
    with pytest.raises(errors.UnexpectedTensors, match="gate_up_proj"):
        route(offer(GATE_UP, DOWN), Inventory(stored))


@pytest.mark.parametrize("odd", ["0.gate_proj", "gate_proj", "down_proj"])
def test_fused_experts_are_no_parts_of_experts_that_differ(odd: str) -> None:
    stored = [spec(found.name, 6, 6) if odd in found.name else found for found in experts().tensors]
    with pytest.raises(errors.UnexpectedTensors, match="gate_up_proj"):
        route(offer(GATE_UP, DOWN), Inventory(tuple(stored)))


@pytest.mark.parametrize("stored", [experts().tensors, (GATE_UP, DOWN)], ids=["one by one", "fused"])
@pytest.mark.parametrize("sent", [experts().tensors, (GATE_UP, DOWN)], ids=["one by one", "fused"])
def test_experts_of_a_drafter_that_is_not_refitted_stay_behind_in_either_form(
    stored: tuple[TensorSpec, ...], sent: tuple[TensorSpec, ...]
) -> None:
    norm = spec("model.norm.weight", 4)
    inventory = Inventory((norm,), unused=tuple(found.name for found in stored))
    assert route(offer(norm, *sent), inventory).rows == (Routed(0, norm),)
    other = [spec(found.name.replace("layers.0", "layers.1"), *found.shape) for found in sent]
    with pytest.raises(errors.UnexpectedTensors, match=r"layers\.1"):
        route(offer(norm, *other), inventory)


def test_fused_experts_of_a_checkpoint_that_has_them_fused_travel_whole() -> None:
    manifest = route(offer(DOWN, GATE_UP), Inventory((GATE_UP, DOWN)))
    assert manifest.rows == (Routed(0, DOWN), Routed(1, GATE_UP))


@pytest.mark.parametrize("absent", ["gate_proj", "down_proj"])
def test_single_experts_of_a_checkpoint_that_has_them_fused_are_refused_with_the_remedy(absent: str) -> None:
    sent = [found for found in experts().tensors if absent not in found.name]
    with pytest.raises(
        errors.UnexpectedTensors, match=r"publish model\.layers\.0\.mlp\.experts\.\w+, stacked as \[3, "
    ):
        route(offer(*sent), Inventory((GATE_UP, DOWN)))


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("tied", [False, True])
def test_b79_rows_beyond_the_vocabulary_stay_where_they_are_only_if_the_offer_says_so(tied: bool) -> None:
    specs = (spec(EMBED, 300, 4), *(() if tied else (spec(HEAD, 304, 4),)))
    inventory = Inventory(specs, {HEAD: EMBED} if tied else {}, (EMBED, HEAD))
    sent = (spec(EMBED, 320, 4), spec(HEAD, 320, 4))
    with pytest.raises(errors.ShapeMismatch, match='pass vocabulary="trim"'):
        route(offer(*sent), inventory)
    rows = route(offer(*sent, vocabulary="trim"), inventory).rows
    assert [(row.spec.name, row.spec.shape, row.start) for row in rows] == [
        (EMBED, (300, 4), 0), (HEAD, (300 if tied else 304, 4), 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param((spec(EMBED, 299, 4), spec("model.norm.weight", 4)), id="too few rows"),
        pytest.param((spec(EMBED, 320, 5), spec("model.norm.weight", 4)), id="other columns"),
        pytest.param((spec(EMBED, 300, 4), spec("model.norm.weight", 5)), id="no vocabulary"),
    ],
)
def test_b79_nothing_but_padding_of_a_vocabulary_is_trimmed(sent: tuple[TensorSpec, ...]) -> None:
    inventory = Inventory((spec(EMBED, 300, 4), spec("model.norm.weight", 4)), {}, (EMBED,))
    with pytest.raises(errors.ShapeMismatch):
        route(offer(*sent, vocabulary="trim"), inventory)


def test_a_transposed_matrix_is_refused_with_its_remedy() -> None:
    with pytest.raises(errors.ShapeMismatch, match="publish the transposed tensor"):
        route(offer(spec(EMBED, 4, 8)), Inventory((spec(EMBED, 8, 4),)))


def test_the_experts_of_a_hundred_layers_in_any_order_each_go_to_their_layer() -> None:
    layers = [f"model.layers.{n}.mlp" for n in range(100)]
    wanted = [s for layer in layers for s in experts(f"{layer}.experts").tensors]
    sent = [spec(f"{layer}.experts.{s.name.rpartition('.')[2]}", *s.shape) for layer in layers for s in (GATE_UP, DOWN)]
    Random(0).shuffle(sent)
    rows = route(offer(*sent), Inventory(tuple(wanted))).rows
    assert {row.spec.name for row in rows} == {s.name for s in wanted}
    for row in rows:
        assert row.spec.name.rpartition(".experts.")[0] == sent[row.index].name.rpartition(".experts.")[0]
