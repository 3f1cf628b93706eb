"""Version spans and the end of a request, as claims about every split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine.errors import IllegalEvent, InvalidRequest
from pitstop.engine.request import Chunk, Life, Piece, RequestLife, SamplingParams, VersionTrack
from pitstop.engine.stream import chunks


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
)
def test_pieces_of_any_size_are_cut_exactly_where_the_weights_changed(gaps: list[int], pieces: list[int]) -> None:
    life = RequestLife("r")
    life.accepted(0)
    swaps = list(itertools.accumulate(gaps))
    truth: list[int] = []
    for version, at in enumerate(swaps, 1):
        truth += [version - 1] * (at - len(truth))
        life.swapped(at, version)
    total = sum(pieces)
    truth += [len(swaps)] * max(0, total - len(truth))
    got: list[int] = []
    for size in pieces:
        for span in life.took(size):
            got += [span.weight_version] * (span.end - span.start)
    assert got == truth[:total]
    spans = life.spans
    assert [v for s in spans for v in [s.weight_version] * (s.end - s.start)] == truth[:total]
    assert all(a.end == b.start and a.weight_version != b.weight_version for a, b in itertools.pairwise(spans))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 30), st.integers(1, 30))
def test_chunks_of_a_piece_lose_and_double_nothing(gaps: list[int], start: int, size: int) -> None:
    track = VersionTrack()
    for version, at in enumerate(itertools.accumulate(gaps, initial=0)):
        track.mark(at, version)
    piece = Piece(list(range(start, start + size)), [0.5] * size, "text", "stop")
    made = chunks(piece, track.cut(start, start + size))
    assert [t for c in made for t in c.token_ids] == piece.token_ids
    assert [c.start for c in made] == list(itertools.accumulate([len(c.token_ids) for c in made[:-1]], initial=start))
    assert "".join(c.text for c in made) == "text"
    assert [c.finish_reason for c in made] == [None] * (len(made) - 1) + ["stop"]


def test_an_empty_last_piece_still_says_how_it_ended() -> None:
    track = VersionTrack()
    track.mark(0, 4)
    assert chunks(Piece((), finish_reason="abort"), track.cut(3, 3)) == [Chunk((), (), "", 3, 4, "abort")]


def test_versions_never_go_back_in_a_track() -> None:
    track = VersionTrack()
    track.mark(5, 1)
    with pytest.raises(IllegalEvent):
        track.mark(4, 2)


def test_a_request_ends_once() -> None:
    life = RequestLife("r")
    life.accepted(0)
    life.ended("stop")
    with pytest.raises(IllegalEvent):
        life.ended("abort")
    assert life.life is Life.ENDED


def test_a_request_with_tokens_is_never_taken_back() -> None:
    life = RequestLife("r")
    life.accepted(0)
    life.took(1)
    with pytest.raises(IllegalEvent, match="1 tokens"):
        life.withdrawn(0)


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": -1}, {"temperature": -0.1}, {"top_p": 0}, {"top_k": -1}, {"stop": ""}, {"min_p": 2},
     {"temperature": float("nan")}, {"max_tokens": 8.0}, {"seed": 1.5}, {"seed": 2**63}, {"ignore_eos": None},
     {"stop": (b"x",)}, {"min_tokens": "1"}, {"stop_token_ids": (1.0,)}],
)  # fmt: skip
def test_parameters_that_cannot_work_are_refused_when_made(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_unset_parameters_are_neutral() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.0, 1.0, 0, 1.0)
