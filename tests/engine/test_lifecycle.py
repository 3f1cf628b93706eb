"""The tables, as claims about every sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine import lifecycle as lc
from pitstop.engine import staging
from pitstop.engine.errors import IllegalEvent
from pitstop.engine.lifecycle import TABLE, Do, Phase, advance
from pitstop.engine.staging import Stage, Staging, StagingBegan, StagingDropped, StagingEnded

EVENTS: list[lc.Event] = [
    lc.BootedWith(0), lc.BootedEmpty(), lc.RefitOffered("r", 1), lc.DeltaOffered("r", 1, 0), lc.Suspended(2),
    lc.WeightsLanded(), lc.Finalized(1), lc.Resumed(), lc.FailedClean("x"), lc.FailedUncommitted("x"),
    lc.FailedQuarantined("x"), lc.FailedTorn("x"), lc.DriftFound("x"), lc.SleepAsked(1), lc.WokenWhole(),
    lc.WokenEmpty(), lc.Died("x"), lc.RestartAsked(), lc.StopAsked(),
]  # fmt: skip


def test_every_event_type_has_a_row_and_every_phase_a_way_in() -> None:
    assert {event for _, event in TABLE} == {type(e) for e in EVENTS}
    assert {to for to, _ in TABLE.values()} | {Phase.STARTING} == set(Phase)


def test_stopped_is_the_only_end() -> None:
    assert {p for p in Phase if not any(start is p for start, _ in TABLE)} == {Phase.STOPPED}


def test_only_a_full_refit_leads_out_of_quarantine() -> None:
    out = {event: to for (start, event), (to, _) in TABLE.items() if start is Phase.QUARANTINED}
    assert out == {
        lc.RefitOffered: Phase.RECEIVING,
        lc.Died: Phase.DEAD,
        lc.StopAsked: Phase.STOPPED,
    }


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_no_sequence_of_events_serves_weights_that_were_not_committed(events: list[lc.Event]) -> None:
    phase, proven = Phase.STARTING, False
    for event in events:
        before = phase
        try:
            phase, do = advance(phase, event)
        except IllegalEvent:
            assert phase is before
            continue
        if isinstance(event, lc.BootedWith) or do is Do.COMMIT:
            proven = True
        if do in (Do.REVOKE, Do.PARK, Do.BURY, Do.BOOT) or isinstance(event, lc.BootedEmpty | lc.WokenEmpty):
            proven = False
        # A failed replica that was idle or quarantined never comes back as if its commit stood: drivers post
        # FailedClean only when the ledger has a commit, which is what `proven` stands for here.
        if isinstance(event, lc.FailedClean) and not proven:
            phase = before
            continue
        if isinstance(event, lc.WokenWhole) and not proven:
            phase = before
            continue
        if phase is Phase.SERVING:
            assert proven


def test_an_illegal_event_names_phase_and_event() -> None:
    with pytest.raises(IllegalEvent, match="Finalized cannot happen while serving") as caught:
        advance(Phase.SERVING, lc.Finalized(1))
    assert caught.value.fields == {"phase": "serving", "event": "Finalized"}


@given(st.lists(st.tuples(st.sampled_from([StagingBegan, StagingEnded, StagingDropped]), st.integers(0, 2))))
def test_staging_never_mixes_two_versions(events: list[tuple[type[staging.StagingEvent], int]]) -> None:
    state = Staging()
    began: int | None = None
    for kind, version in events:
        try:
            state = staging.advance(state, kind(version))
        except IllegalEvent:
            continue
        if kind is StagingBegan:
            assert began is None
            began = version
        assert version == began
        if state.stage is Stage.EMPTY:
            began = None
        assert state.weight_version == began
