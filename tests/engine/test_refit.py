"""An offer against an inventory: everything is checked before anything is suspended."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine import errors
from pitstop.engine.naming import plain
from pitstop.engine.refit import Deadlines, RefitOptions, route, unequal_ties
from pitstop.engine.worker_ports import Inventory, Offer, TensorSpec, Trailer

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def spec(name: str, dtype: str = "bfloat16", shape: tuple[int, ...] = (8, 4)) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def offer(*tensors: TensorSpec, **more: object) -> Offer:
    return Offer("r", 1, tensors, **more)  # type: ignore[arg-type]


UNTIED = Inventory((spec(EMBED), spec(HEAD), spec(NORM, shape=(4,))))
TIED = Inventory((spec(EMBED), spec(NORM, shape=(4,))), {HEAD: EMBED})


def test_a_fitting_offer_travels_in_its_own_order() -> None:
    manifest = route(offer(spec(NORM, shape=(4,)), spec(HEAD), spec(EMBED)), UNTIED)
    assert [(row.index, row.spec.name) for row in manifest.rows] == [(0, NORM), (1, HEAD), (2, EMBED)]


def test_missing_tensors_are_named() -> None:
    with pytest.raises(errors.MissingTensors, match=r"lm_head\.weight"):
        route(offer(spec(EMBED), spec(NORM, shape=(4,))), UNTIED)


def test_unexpected_tensors_are_named_with_what_they_may_have_meant() -> None:
    with pytest.raises(errors.UnexpectedTensors, match=r"lm_heed\.weight.*did you mean lm_head\.weight"):
        route(offer(spec(EMBED), spec("lm_heed.weight"), spec(NORM, shape=(4,))), UNTIED)


def test_repeated_tensors_are_named_also_when_wrappers_hide_it() -> None:
    with pytest.raises(errors.RepeatedTensors, match=r"lm_head\.weight"):
        route(offer(spec(EMBED), spec(HEAD), spec(f"module.{HEAD}"), spec(NORM, shape=(4,))), UNTIED)


def test_wrong_shapes_are_named_with_both_shapes() -> None:
    with pytest.raises(errors.ShapeMismatch, match=r"\[4, 8\], not \[8, 4\]"):
        route(offer(spec(EMBED), spec(HEAD, shape=(4, 8)), spec(NORM, shape=(4,))), UNTIED)


def test_a_wrong_dtype_names_the_option_that_would_cast_it() -> None:
    fp32 = [spec(EMBED, "float32"), spec(HEAD, "float32"), spec(NORM, "float32", (4,))]
    with pytest.raises(errors.DtypeMismatch, match='cast="inventory"'):
        route(offer(*fp32), UNTIED)
    assert {row.spec.dtype for row in route(offer(*fp32, cast="inventory"), UNTIED).rows} == {"bfloat16"}


def test_a_cast_is_for_floating_point_only() -> None:
    with pytest.raises(errors.DtypeMismatch, match="cannot be cast"):
        route(offer(spec(EMBED, "int8"), spec(HEAD), spec(NORM, shape=(4,)), cast="inventory"), UNTIED)


@pytest.mark.parametrize("sent", [(EMBED,), (HEAD,), (EMBED, HEAD), (HEAD, EMBED)])
def test_of_two_tied_tensors_either_may_be_left_out(sent: tuple[str, ...]) -> None:
    manifest = route(offer(*(spec(name) for name in sent), spec(NORM, shape=(4,))), TIED)
    assert [row.spec.name for row in manifest.rows] == [*sent, NORM]
    assert len(manifest.equal) == (len(sent) == 2)


def test_tied_tensors_with_different_content_are_found_by_their_digests() -> None:
    manifest = route(offer(spec(EMBED), spec(HEAD), spec(NORM, shape=(4,))), TIED)
    assert unequal_ties(manifest, Trailer("r", (5, 5, 1))) == []
    assert unequal_ties(manifest, Trailer("r", (5, 6, 1))) == [f"{HEAD} and {EMBED}"]


def test_an_empty_offer_is_refused() -> None:
    with pytest.raises(errors.OfferRejected):
        route(offer(), UNTIED)


PIECES = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


@given(st.data())
def test_wrapper_pieces_anywhere_in_a_name_are_stripped(data: st.DataObject) -> None:
    parts = ["model", "layers", "0", "mlp", "down_proj", "weight"]
    wrapped = parts[:]
    for piece in data.draw(st.lists(st.sampled_from([*PIECES, "base_layer"]), max_size=4)):
        wrapped.insert(data.draw(st.integers(0, len(wrapped))), piece)
    assert plain(".".join(wrapped)) == ".".join(parts)


def test_deadlines_must_be_positive_and_policies_known() -> None:
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(errors.UnsupportedPolicy):
            Deadlines(suspend=wrong)
    with pytest.raises(errors.UnsupportedPolicy, match="keep, recompute, wait, abort"):
        RefitOptions(policy="migrate")  # type: ignore[arg-type]
    assert Deadlines().receiving(2 << 30) == 122.0


def test_every_error_survives_a_process_border_as_data() -> None:
    def tree(kind: type[errors.PitstopError]) -> list[type[errors.PitstopError]]:
        return [kind, *(k for child in kind.__subclasses__() for k in tree(child))]

    kinds = tree(errors.PitstopError)
    assert len({k.slug for k in kinds}) == len(kinds)
    for kind in kinds:
        again = errors.from_record(kind("what", replica="r", seconds=1.5).record())
        assert (type(again), str(again), again.fields) == (kind, "what", {"replica": "r", "seconds": 1.5})
        assert type(pickle.loads(pickle.dumps(again))) is kind


def test_an_error_about_a_replica_is_the_same_error_with_what_it_had_not_said() -> None:
    error = errors.DeadlineExceeded("too late", peer="trainer", seconds=4.0)
    error.remote_traceback = "there"
    told = error.about(replica="replica-1", peer="another")
    assert (type(told), told.message, told.remote_traceback) == (errors.DeadlineExceeded, "too late", "there")
    assert told.fields == {"replica": "replica-1", "peer": "trainer", "seconds": 4.0}
    assert "replica" not in error.fields
