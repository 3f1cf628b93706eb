"""What the benchmark of staged refits makes of what it sees: that needs no GPU, unlike the rest of it."""

from __future__ import annotations

import pytest

from benchmarks.staged_refit_h200 import Stamps, Watch, compared, found, peer_of
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Transition, Work

SECOND = 1_000_000_000
PRINTED = """bytes 14.19 GiB 339 tensors
up 41.0
inited
steady tok/s 10410.3
mode=keep clear=True pause 0.0389 start 0.0133 update 0.0859 (sender 0.0835 = 170 GiB/s) finish 0.0050 resume 0.0015 total 0.1445 bubble 0.1705
mode=keep clear=False pause 0.0741 start 0.0082 update 0.1265 (sender 0.1240 = 114 GiB/s) finish 0.0060 resume 0.0023 total 0.2170 bubble 0.2207
mode=keep clear=False pause 0.0322 start 0.0091 update 0.1271 (sender 0.1240 = 114 GiB/s) finish 0.0068 resume 0.0021 total 0.1773 bubble 0.1771
"""  # noqa: E501 - as it prints


def test_what_the_peer_prints_is_understood_and_silence_is_no_figure() -> None:
    peer = peer_of(PRINTED)
    assert (peer["steady_tok_s"], peer["way"], peer["refits"]) == (10410.3, "nccl", 2)
    assert peer["bubble_s"] == {"median": 0.1989, "least": 0.1771, "most": 0.2207}
    assert peer["total_s"]["median"] == pytest.approx(0.19715)
    with pytest.raises(ValueError, match="printed no refit"):
        peer_of("Traceback: out of memory")


def test_of_a_peers_two_ways_the_one_with_the_shorter_bubble_counts() -> None:
    line = "mode=keep clear=False packed={} pause 0.0389 start 0.0133 update 0.0859 total 0.1 bubble {}"
    lines = [line.format(*one) for one in ((False, 0.9), (False, 0.1), (False, 0.2), (True, 0.01), (True, 0.3))]
    peer = peer_of("\n".join(["steady tok/s 5.0", *lines]))
    assert (peer["way"], peer["refits"], peer["bubble_s"]["median"]) == ("in one call", 2, pytest.approx(0.15))
    assert peer["ways"]["packed"]["bubble_s"]["median"] == 0.3


def test_a_refit_of_the_peers_after_which_no_token_came_is_not_passed_over() -> None:
    line = "mode=keep clear=False packed=False pause 0.0389 total 0.1 bubble {}"
    peer = peer_of("\n".join(["steady tok/s 5.0", *(line.format(one) for one in ("nan", 0.2, "nan", 0.4))]))
    assert peer["refits"] == 3
    assert peer["bubble_s"] == {"median": pytest.approx(0.3), "least": 0.2, "most": 0.4}
    with pytest.raises(ValueError, match="nothing was measured"):
        peer_of("\n".join(["steady tok/s 5.0", *(line.format(one) for one in (0.2, "nan"))]))


def test_rates_and_gaps_are_those_of_the_time_asked_for() -> None:
    stamps = Stamps()
    for n in range(100):
        stamps.add(n * SECOND // 10, 8)
    stamps.add(12 * SECOND, 8)
    assert stamps.rate(2 * SECOND + 1, 4 * SECOND) == pytest.approx(80)
    assert stamps.rate(10 * SECOND, 11 * SECOND) == 0
    assert stamps.gap(11 * SECOND) == pytest.approx(2.1)
    assert stamps.gap(9 * SECOND + 950_000_000) == pytest.approx(2.1)
    assert stamps.gap(13 * SECOND) != stamps.gap(13 * SECOND), "no token after it: no figure"


def test_an_engines_refits_are_told_apart_by_what_the_observer_saw() -> None:
    stamps, watch = Stamps(), Watch()
    for n in range(4000):
        at = n * SECOND // 100
        staging = 15 <= n / 100 < 17
        if not 17.0 <= n / 100 < 17.5:
            stamps.add(at, 9 if staging else 10)
    watch.opened(Work("stage", "stage:7", 15 * SECOND))
    watch.closed("stage:7", 17 * SECOND)
    for before, after, moment in ((Phase.FINALIZING, Phase.RESUMING, 17.4), (Phase.RESUMING, Phase.SERVING, 17.45)):
        watch.transition(Transition("r", 1, before, "E", after, int(moment * SECOND)))
    report = {
        "policy": "keep", "staging": "device", "why": "there is room", "nbytes": 1, "stage_s": 2.0, "bubble_s": 0.5,
        "seconds": 2.6, "steady": 1000.0,
    }  # fmt: skip
    one = found(stamps, watch, [report])["keep"]
    assert one["refits"] == 1
    assert one["staging_ratio"]["median"] == pytest.approx(0.9, abs=0.01)
    assert one["bubble_s"]["median"] == pytest.approx(0.51, abs=0.011)
    assert one["phase_s"] == {"stage_s": {"median": 2.0, "least": 2.0, "most": 2.0}}
    assert compared({"ours": {"19": {"steady_tok_s": {}, "keep": one}}, "peer": peer_of(PRINTED)}) == {
        "19 keep": {
            "staging_ratio": one["staging_ratio"]["median"], "total_to_peer": round(2.6 / 0.19715, 4),
            "bubble_to_peer": round(one["bubble_s"]["median"] / 0.1989, 4),
        }
    }  # fmt: skip
    assert compared({"ours": {"19": {"keep": one}}}) == {"19 keep": {"staging_ratio": one["staging_ratio"]["median"]}}
