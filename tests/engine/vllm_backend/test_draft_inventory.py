"""Whose a tensor is, the target's or its drafter's, and where a drafter's are: from names and headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.errors import CheckpointUnreadable, MissingTensors, ShapeMismatch, UnexpectedTensors
from pitstop.engine.refit import route
from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected
from pitstop.engine.vllm_backend.draft_inventory import Draft, draft_of, tensors_of, with_drafter
from pitstop.engine.vllm_backend.inventory import from_headers, is_draft_layer
from pitstop.engine.worker_ports import Inventory, Offer, TensorSpec
from tests.engine.vllm_backend.test_inventory import EMBED, HEAD, checkpoint, safetensors

BASE = [EMBED, "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", HEAD]
NORM, COPY, HEAD_COPY = (
    "model.layers.2.enorm.weight", "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"
)  # fmt: skip
TWO = {"num_hidden_layers": 2}


def made(folder: Path, names: list[str], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    return checkpoint(folder, {name: ("F32", [4, 2]) for name in names}, **{**TWO, **config})


def layers(folder: Path, *, trained: bool) -> Draft:
    return Draft(False, trained, str(folder), 2)


def names(inventory: Inventory) -> list[str]:
    return [spec.name for spec in inventory.tensors]


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("model.layers.1.mlp.up_proj.weight", False),
        ("model.layers.2.mlp.up_proj.weight", True),
        ("layers.2.enorm.weight", True),
        ("model.language_model.layers.2.enorm.weight", True),
        ("model.vision_tower.layers.2.mlp.weight", False),
        ("visual.encoder.layers.17.mlp.weight", False),
        ("mtp.layers.0.mlp.up_proj.weight", True),
        ("model.mtp.fc.weight", True),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("model.layers.0.mtp_gate.weight", False),
        ("model.smtp.weight", False),
        (EMBED, False),
    ],
)
def test_layers_behind_the_models_own_and_what_is_called_mtp_are_a_drafters(name: str, drafts: bool) -> None:
    assert is_draft_layer(name, 2) is drafts


@pytest.mark.parametrize(
    ("asked", "choice", "found"),
    [
        pytest.param(None, None, None, id="no drafter"),
        pytest.param({"method": "ngram"}, None, None, id="one without weights"),
        pytest.param({"model": "ngram"}, None, None, id="one without weights, as a model"),
        pytest.param({"method": "mtp"}, None, (False, True), id="layers of the target are trained with it"),
        pytest.param({"method": "mtp"}, "frozen", (False, False), id="unless they are not"),
        pytest.param({"method": "mtp", "model": "m"}, None, (False, True), id="the target named again"),
        pytest.param({"method": "eagle3", "model": "d"}, None, (True, False), id="another checkpoint is not trained"),
        pytest.param({"method": "eagle3", "model": "d"}, "trained", (True, True), id="unless it is"),
    ],
)
def test_what_a_launch_asks_for(asked: Mapping[str, Any] | None, choice: Any, found: tuple[bool, bool] | None) -> None:
    draft = draft_of("m", {"speculative_config": asked}, choice)
    assert (draft and (draft.own, draft.trained)) == found


@pytest.mark.parametrize("asked", [None, {"method": "ngram"}])
def test_a_choice_about_no_weights_is_refused(asked: Mapping[str, Any] | None) -> None:
    with pytest.raises(EngineArgumentRejected, match="asks for none"):
        draft_of("m", {"speculative_config": asked}, "trained")


def test_trained_layers_are_of_the_inventory_and_their_copies_of_the_targets_tensors_are_tied(tmp_path: Path) -> None:
    folder = made(tmp_path, [*BASE, NORM, COPY, HEAD_COPY])
    found = with_drafter(from_headers(folder), folder, layers(folder, trained=True))
    assert names(found) == [*BASE, NORM]
    assert found.tied == {COPY: EMBED, HEAD_COPY: HEAD}
    assert (found.drafter, found.unused) == ((NORM,), ())


def test_a_copy_of_a_tied_head_is_tied_to_the_embedding(tmp_path: Path) -> None:
    folder = made(tmp_path, [*BASE[:-1], NORM, HEAD_COPY], tie_word_embeddings=True)
    found = with_drafter(from_headers(folder), folder, layers(folder, trained=True))
    assert found.tied == {HEAD: EMBED, HEAD_COPY: EMBED}


@pytest.mark.parametrize("drafter", ["frozen", "of its own", "none"])
def test_layers_that_no_refit_brings_may_be_offered_and_stay_behind(tmp_path: Path, drafter: str) -> None:
    folder = made(tmp_path, [*BASE, NORM, COPY])
    own = Draft(True, False, "hub/id")
    draft = {"frozen": layers(folder, trained=False), "of its own": own, "none": None}[drafter]
    found = with_drafter(from_headers(folder), folder, draft)
    assert names(found) == BASE
    assert found.unused == (NORM, COPY)
    everything = with_drafter(from_headers(folder), folder, layers(folder, trained=True))
    offer = Offer("r", 1, everything.tensors)
    assert [row.spec.name for row in route(offer, found).rows] == BASE
    assert [row.index for row in route(offer, found).rows] == [0, 1, 2, 3]
    strange = Offer("r", 1, (*everything.tensors, TensorSpec("other.weight", "float32", (1,))))
    with pytest.raises(UnexpectedTensors, match=r"1 offered tensors .*: other\.weight"):
        route(strange, found)


def test_what_is_missing_of_a_trained_drafter_alone_says_how_to_do_without(tmp_path: Path) -> None:
    folder = made(tmp_path, [*BASE, NORM])
    found = with_drafter(from_headers(folder), folder, layers(folder, trained=True))
    with pytest.raises(MissingTensors, match=rf"1 tensors .*: {NORM}; .* drafter='frozen'"):
        route(Offer("r", 1, found.tensors[:-1]), found)
    with pytest.raises(MissingTensors) as missing:
        route(Offer("r", 1, found.tensors[:-2]), found)
    assert "frozen" not in str(missing.value)


def test_a_drafter_with_a_checkpoint_of_its_own_is_listed_under_a_prefix(tmp_path: Path) -> None:
    folder = made(tmp_path / "target", BASE)
    own = made(tmp_path / "draft", ["fc.weight", "midlayer.mlp.up_proj.weight", "d2t", "t2d", HEAD])
    found = with_drafter(from_headers(folder), folder, Draft(True, True, str(own)))
    wanted = ["draft.fc.weight", "draft.midlayer.mlp.up_proj.weight", "draft.d2t", f"draft.{HEAD}"]
    assert names(found) == [*BASE, *wanted]
    assert list(found.drafter) == wanted


def test_a_drafters_whole_checkpoint_is_a_version_also_with_what_no_engine_loads(tmp_path: Path) -> None:
    folder = made(tmp_path / "target", BASE)
    own = made(tmp_path / "draft", ["fc.weight", "d2t", "t2d"])
    found = with_drafter(from_headers(folder), folder, Draft(True, True, str(own)))
    stored = [replace(spec, name=f"draft.{spec.name}") for spec in from_headers(own).tensors]
    manifest = route(Offer("r", 1, (*found.tensors[: len(BASE)], *stored)), found)
    assert [row.spec.name for row in manifest.rows] == [*BASE, "draft.fc.weight", "draft.d2t"]
    odd = replace(stored[0], name="draft.odd.weight")
    with pytest.raises(UnexpectedTensors, match=r"draft\.odd\.weight") as strange:
        route(Offer("r", 1, (*found.tensors, odd)), found)
    assert "drafter='trained'" not in str(strange.value)


def test_a_trained_drafter_of_which_nothing_is_stored_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, BASE)
    with pytest.raises(CheckpointUnreadable, match="launch with drafter='frozen'"):
        with_drafter(from_headers(folder), folder, layers(folder, trained=True))


def sharded(folder: Path) -> Path:
    """The three files of a checkpoint: the first holds nothing of the draft layer, and is gone."""
    where = {
        EMBED: "a", "model.layers.0.mlp.up_proj.weight": "a", "model.layers.2.mlp.up_proj.weight": "b",
        "model.layers.1.mlp.up_proj.weight": "b", HEAD_COPY: "c",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(TWO))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for file in "bc":
        stored: dict[str, tuple[str, list[int]]] = {name: ("F32", [4]) for name in where if where[name] == file}
        (folder / file).write_bytes(safetensors(stored))
    return folder


def test_only_the_files_that_hold_draft_layers_are_looked_into(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    assert tensors_of(layers(folder, trained=False)) == {
        folder / "b": ["model.layers.2.mlp.up_proj.weight"],
        folder / "c": [HEAD_COPY],
    }
    found = with_drafter(Inventory(()), folder, layers(folder, trained=True))
    assert names(found) == ["model.layers.2.mlp.up_proj.weight", HEAD_COPY]


def test_a_drafter_that_is_nowhere_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="has no tensors of a drafter"):
        tensors_of(layers(made(tmp_path, BASE), trained=False))


def test_b79_padding_of_a_trained_drafters_vocabulary_is_trimmed_where_that_is_asked_for(tmp_path: Path) -> None:
    target, draft = made(tmp_path / "m", BASE), made(tmp_path / "d", [EMBED, "fc.weight"])
    found = with_drafter(from_headers(target), target, Draft(True, True, str(draft)))
    padded = {f"draft.{EMBED}": (8, 2)}
    sent = tuple(replace(spec, shape=padded.get(spec.name, spec.shape)) for spec in found.tensors)
    with pytest.raises(ShapeMismatch, match="trim"):
        route(Offer("r", 1, sent), found)
    manifest = route(Offer("r", 1, sent, vocabulary="trim"), found)
    assert {row.spec.shape for row in manifest.rows} == {(4, 2)}


@pytest.mark.parametrize("tied", [False, True])
def test_b79_padding_of_what_draft_layers_copy_of_the_targets_vocabulary_is_trimmed_with_it(
    tmp_path: Path, tied: bool
) -> None:
    base = BASE[:-1] if tied else BASE
    folder = made(tmp_path, [*base, NORM, COPY, HEAD_COPY], tie_word_embeddings=tied)
    found = with_drafter(from_headers(folder), folder, layers(folder, trained=True))
    sent = [*found.tensors, *(TensorSpec(name, "float32", (4, 2)) for name in (COPY, HEAD_COPY))]
    sent = [replace(spec, shape=(8, 2)) if spec.name in {EMBED, HEAD, COPY, HEAD_COPY} else spec for spec in sent]
    with pytest.raises(ShapeMismatch, match="trim"):
        route(Offer("r", 1, tuple(sent)), found)
    manifest = route(Offer("r", 1, tuple(sent), vocabulary="trim"), found)
    assert {row.spec.shape for row in manifest.rows} == {(4, 2)}
    assert len(manifest.equal) == 2
