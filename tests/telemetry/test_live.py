from __future__ import annotations

import io

from rich.console import Console

from pitstop.telemetry.live import Live
from tests.telemetry.builders import P, change, generate, refit_work, whole_refit

SECOND = 1_000_000_000


def shown(live: Live, now: int) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(live.render(now))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_a_row_says_what_a_replica_does_and_how_its_last_refit_went() -> None:
    live = Live()
    live.transition(change(P.DEAD, "RestartAsked", P.STARTING, 0))
    live.transition(change(P.STARTING, "BootedWith", P.SERVING, SECOND, version=1))
    live.opened(refit_work("r", SECOND))
    for each in whole_refit("r", 2 * SECOND, SECOND // 4, live=5):
        live.transition(each)
    live.closed("refit:r", 4 * SECOND, detail={"outcome": "committed"})
    row = live.rows["a"]
    assert (row.phase, row.weight_version, row.live, row.age(4 * SECOND)) == (P.SERVING, 2, 5, 1.0)
    assert row.seconds == {"suspend": 0.25, "receive": 0.25, "finalize": 0.25, "resume": 0.25}
    text = shown(live, 4 * SECOND)
    assert "serving" in text
    assert "receive 0.250" in text
    assert "1 committed" in text


def test_a_failure_stays_in_sight_until_the_next_refit() -> None:
    live = Live()
    live.transition(whole_refit("r", 0)[0])
    live.transition(change(P.SUSPENDING, "Died", P.DEAD, SECOND, refit="r", error="replica_died"))
    assert live.rows["a"].weight_version is None
    assert "replica_died" in shown(live, SECOND)
    live.transition(change(P.DEAD, "RestartAsked", P.STARTING, SECOND, incarnation=2))
    live.transition(change(P.RECEIVING, "Died", P.DEAD, SECOND, incarnation=1))
    assert live.rows["a"].phase is P.STARTING
    live.transition(change(P.STARTING, "BootedWith", P.SERVING, SECOND, incarnation=2, version=0))
    assert "replica_died" not in shown(live, SECOND)


def test_requests_are_counted_in_and_out() -> None:
    live = Live()
    live.opened(generate("a", 0))
    live.opened(generate("b", 0))
    live.closed("generate:a", 1, None, {"finish_reason": "length"})
    live.closed("generate:zzz", 1, "peer_lost")
    assert (live.active, dict(live.finished)) == (1, {"length": 1})
    assert "1 active, 1 length" in shown(live, 1)
