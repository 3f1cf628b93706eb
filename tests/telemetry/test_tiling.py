"""Whatever the lifecycle allows, phases tile."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from pitstop.engine.lifecycle import TABLE, Phase
from pitstop.engine.ports import Transition
from pitstop.telemetry import names
from pitstop.telemetry.observer import REFITTING, SPAN_OF
from tests.telemetry.builders import Recorder, attributes, context, parent_id, refit_work

ROWS = sorted(((p, e.__name__, after) for (p, e), (after, _) in TABLE.items()), key=lambda row: (row[0].value, row[1]))
FAILURES = {"FailedClean", "FailedUncommitted", "FailedQuarantined", "FailedTorn", "DriftFound", "Died"}


@dataclass
class Replica:
    """A replica as the test sees it: what spans it should leave."""

    name: str
    phase: Phase = Phase.STARTING
    incarnation: int = 1
    since: int | None = None
    refit: str | None = None
    refit_since: int = 0
    leaves: list[tuple[str, str, int, int]] = field(default_factory=list)
    refits: list[tuple[str, str, int, int]] = field(default_factory=list)

    def ends(self, at: int) -> None:
        name = SPAN_OF.get(self.phase)
        if name is not None and self.since is not None:
            self.leaves.append((self.name, name, self.since, at))

    def refit_ends(self, at: int) -> None:
        if self.refit is not None:
            self.refits.append((self.name, self.refit, self.refit_since, at))
            self.refit = None


Step = tuple[int, int, int, bool]
STEPS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(0, 1_000), st.booleans()), max_size=80)


def shape(span: ReadableSpan) -> tuple[object, str, int | None, int | None]:
    return attributes(span)[names.REPLICA_ID], span.name, span.start_time, span.end_time


@given(STEPS)
def test_phases_tile_and_every_span_ends_once(steps: list[Step]) -> None:
    recorder = Recorder()
    observer = recorder.observer()
    replicas = [Replica("a"), Replica("b")]
    now, refits = 1, 0
    for which, choice, gap, closes in steps:
        now += gap
        replica = replicas[which]
        rows = [row for row in ROWS if row[0] is replica.phase]
        if not rows:
            continue
        before, event, after = rows[choice % len(rows)]
        if event in ("RefitOffered", "DeltaOffered"):
            refits += 1
            replica.refit, replica.refit_since = str(refits), now
            observer.opened(refit_work(str(refits), now))
        if event == "RestartAsked":
            replica.incarnation += 1
        refit = replica.refit
        observer.transition(
            Transition(
                replica.name, replica.incarnation, before, event, after, now, refit,
                error="slug" if event in FAILURES else None,
            )
        )  # fmt: skip
        replica.ends(now)
        if after not in REFITTING:
            replica.refit_ends(now)
            if refit is not None and closes:
                observer.closed(f"refit:{refit}", now)
        replica.phase, replica.since = after, now
    observer.cut(now)
    for replica in replicas:
        replica.ends(now)
        replica.refit_ends(now)

    assert len(recorder.begun) == len(recorder.ended)
    assert len({context(span).span_id for span in recorder.ended}) == len(recorder.ended)
    assert recorder.dropped == {}
    leaves = [span for span in recorder.ended if span.name in SPAN_OF.values()]
    assert sorted(map(shape, leaves), key=str) == sorted((leaf for r in replicas for leaf in r.leaves), key=str)
    parts = recorder.named(names.REFIT_REPLICA)
    assert sorted((attributes(s)[names.REPLICA_ID], attributes(s)[names.REFIT_ID], s.start_time, s.end_time)
                  for s in parts) == sorted(part for r in replicas for part in r.refits)  # fmt: skip
    roots = {attributes(span)[names.REFIT_ID]: span for span in recorder.named(names.REFIT)}
    for part in parts:
        root = roots[attributes(part)[names.REFIT_ID]]
        assert parent_id(part) == context(root).span_id
        assert context(part).trace_id == context(root).trace_id
        # In the order they ended: some take no time at all.
        children = [span for span in recorder.ended if parent_id(span) == context(part).span_id]
        borders = [part.start_time, *(span.end_time for span in children)]
        assert [span.start_time for span in children] == borders[:-1]
        assert borders[-1] == part.end_time
        failed = any(span.status.status_code is StatusCode.ERROR for span in children)
        assert (part.status.status_code is StatusCode.ERROR) == failed
    inside = {context(part).span_id for part in parts}
    for span in leaves:
        assert parent_id(span) is None or parent_id(span) in inside


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Phase)), st.sampled_from(ROWS).map(lambda row: row[1]), st.sampled_from(list(Phase)),
            st.integers(0, 50), st.integers(1, 3), st.sampled_from([None, "1", "2"]),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_senseless_transitions_still_give_whole_spans(
    changes: list[tuple[Phase, str, Phase, int, int, str | None]],
) -> None:
    recorder = Recorder()
    observer = recorder.observer()
    for before, event, after, at, incarnation, refit in changes:
        observer.transition(Transition("a", incarnation, before, event, after, at, refit))
    observer.cut(60)
    observer.cut(61)
    assert len(recorder.begun) == len(recorder.ended)
    assert len({context(span).span_id for span in recorder.ended}) == len(recorder.ended)
    assert all((span.end_time or 0) >= (span.start_time or 0) for span in recorder.ended)
