"""Turns what the engine says into spans.

A replica's spans tile its life: the span of a phase starts at the transition in and ends at the transition out, with
the same integer at the border, and `rl.refit_replica` is exactly as long as the phases beneath it. Parents are what
waits, links are what is affected: a replica's receiving is a child of its refit and linked to the trainer's sending.

No span is ever current: parents are passed, so nothing leaks into the tasks that happen to call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext, SpanKind

from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Scalar, Transition, Work
from pitstop.telemetry import context, names
from pitstop.telemetry.generate import RequestSpans
from pitstop.telemetry.spans import Attributes, Bench, Drop, OpenSpan, Pen

SPAN_OF: Final[Mapping[Phase, str]] = {
    Phase.STARTING: names.BOOT,
    Phase.IDLE: names.IDLE,
    Phase.SERVING: names.SERVE,
    Phase.SUSPENDING: names.SUSPEND,
    Phase.RECEIVING: names.RECEIVE_WEIGHTS,
    Phase.FINALIZING: names.FINALIZE,
    Phase.RESUMING: names.RESUME,
    Phase.SLEEPING: names.SLEEP,
    Phase.QUARANTINED: names.QUARANTINE,
}
REFITTING: Final[Mapping[Phase, str]] = {
    Phase.SUSPENDING: "suspend",
    Phase.RECEIVING: "receive",
    Phase.FINALIZING: "finalize",
    Phase.RESUMING: "resume",
}
"""The phases of a refit, and what `ReplicaReport.seconds` calls them."""


_GONE: Final = frozenset({Phase.DEAD, Phase.STOPPED})
# These say what begins; every other event says how what went before has ended.
_ORDERS: Final = frozenset({"RefitOffered", "DeltaOffered", "SleepAsked", "RestartAsked"})
_FAILURES: Final = frozenset(
    {"FailedClean", "FailedUncommitted", "FailedQuarantined", "FailedTorn", "DriftFound", "Died"}
)
_OUTCOMES: Final = {"Finalized": "committed", "FailedTorn": "torn", "Died": "died", "StopAsked": "stopped"}
_WORK: Final = {
    "refit": (names.REFIT, SpanKind.INTERNAL),
    "stage": (names.STAGE, SpanKind.CONSUMER),
    "send_weights": (names.SEND_WEIGHTS, SpanKind.PRODUCER),
}
_REMEMBERED: Final = 64


def failure(change: Transition) -> str | None:
    """Return the slug of what a transition reports as failed, if anything."""
    return change.error or (names.OTHER_ERROR if change.event in _FAILURES else None)


@dataclass(slots=True)
class _Lane:
    """What one replica has open."""

    incarnation: int
    phase: Phase | None = None
    since: int = 0
    version: int | None = None
    leaf: OpenSpan | None = None
    refit: OpenSpan | None = None
    outcome: str = "failed"

    def spans(self) -> list[OpenSpan]:
        """Take out what is open, the innermost first."""
        found = [span for span in (self.leaf, self.refit) if span is not None]
        self.leaf = self.refit = None
        return found


@dataclass(slots=True)
class _Refit:
    """What the parts of a refit need to know of it, also after it has ended."""

    span: SpanContext
    sent_by: SpanContext | None
    attributes: Attributes


class SpanObserver:
    """Makes the spans of one process. `dropped(signal, reason)` is told of everything that could not become one."""

    def __init__(
        self,
        tracer: trace.Tracer,
        *,
        level: int = 1,
        sample: float = 0.05,
        dropped: Drop = lambda signal, reason: None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._level = level
        self._sample = sample
        self._dropped = dropped
        self._draw = draw
        self.forget(tracer)

    def forget(self, tracer: trace.Tracer) -> None:
        """Start anew with `tracer`: after a fork, what is open belongs to the parent."""
        self._pen = Pen(tracer, self._dropped)
        self._requests = RequestSpans(self._pen, self._sample, self._draw) if self._level > 1 else None
        self._work = Bench(self._dropped)
        self._lanes: dict[str, _Lane] = {}
        self._refits: dict[str, _Refit] = {}

    def transition(self, change: Transition) -> None:
        """End the span of the phase that was left, begin that of the one entered."""
        lane = self._lane(change)
        if lane is None:
            return
        at, error, ordered = max(change.at, lane.since), failure(change), change.event in _ORDERS
        known = self._pen.attributes(change.detail)
        if lane.leaf is not None:
            lane.leaf.end(at, error, None if ordered else _about(known, lane.phase))
        self._judge(lane, change, error)
        begun_by = None
        if lane.refit is not None and change.after not in REFITTING:
            begun_by = lane.refit.context
            lane.refit.end(at, None, known | {names.REFIT_OUTCOME: lane.outcome})
            lane.refit = None
        elif lane.refit is None and change.after in REFITTING and (change.refit_id or ordered):
            lane.refit = self._refit_begins(lane, change, at, known)
        lane.leaf = self._phase_begins(lane, change, at, known if ordered else {}, begun_by)
        lane.phase, lane.since = change.after, at

    def opened(self, work: Work) -> Mapping[str, str]:
        """Begin work; return headers that name its span, or the caller's if it has none."""
        if work.kind == "generate":
            return work.headers if self._requests is None else self._requests.opened(work)
        if work.kind not in _WORK:
            self._dropped("span", "unknown_kind")
            return work.headers
        name, kind = _WORK[work.kind]
        attributes = self._pen.attributes(work.detail)
        refit_id, _, replica = work.key.partition(":")[2].partition(":")
        attributes.setdefault(names.REFIT_ID, refit_id)
        if replica:
            attributes.setdefault(names.REPLICA_ID, replica)
        carrier, above = context.extract(work.headers), self._work.get(work.parent)
        parent = above.context if above is not None else carrier or context.current()
        links = self._sent_by(refit_id) if work.kind == "stage" else ()
        span = self._pen.begin(name, work.at, parent, attributes, kind, links)
        self._work.put(work.key, span)
        if work.kind == "refit":
            while len(self._refits) >= _REMEMBERED:
                self._refits.pop(next(iter(self._refits)))
            self._refits[refit_id] = _Refit(span.context, carrier, attributes)
        return context.inject(span.context, work.headers)

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """End work."""
        if key.startswith("generate:"):
            if self._requests is not None:
                self._requests.closed(key, at, error, detail)
            return
        span = self._work.take(key)
        if span is None:
            self._dropped("span", "unknown_key")
        else:
            span.end(at, error, self._pen.attributes(detail))

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        """Ignore it: numbers are for the instruments."""

    def cut(self, at: int | None = None) -> None:
        """End everything that is open, marked as cut short: the process ends before it does."""
        at = time.time_ns() if at is None else at
        for lane in list(self._lanes.values()):
            for span in lane.spans():
                span.cut(max(at, lane.since))
        self._work.cut(at)
        if self._requests is not None:
            self._requests.cut(at)

    def _lane(self, change: Transition) -> _Lane | None:
        """Return the replica's lane, ready for the transition; None if it comes too late or twice."""
        lane = self._lanes.get(change.replica)
        if lane is None:
            lane = self._lanes[change.replica] = _Lane(change.incarnation)
        elif change.incarnation < lane.incarnation:
            self._dropped("transition", "stale_incarnation")
            return None
        elif change.incarnation > lane.incarnation:
            if lane.phase not in _GONE:
                self._dropped("transition", "missed")
            for span in lane.spans():
                span.end(max(change.at, lane.since), names.OTHER_ERROR)
            lane.incarnation, lane.phase, lane.version = change.incarnation, None, None
        elif lane.phase is change.after:
            self._dropped("transition", "repeated")
            return None
        elif lane.phase is not None and lane.phase is not change.before:
            self._dropped("transition", "missed")
        return lane

    def _judge(self, lane: _Lane, change: Transition, error: str | None) -> None:
        """Keep what the transition says about the replica's refit and its version."""
        if lane.refit is not None:
            lane.refit.error = lane.refit.error or error
            if error is not None or change.event in _OUTCOMES:
                lane.outcome = _OUTCOMES.get(change.event, "failed")
        if change.event in ("BootedWith", "Finalized"):
            lane.version = change.weight_version
        elif change.event in ("BootedEmpty", "FailedTorn", "DriftFound", "WokenEmpty") or change.after in _GONE:
            lane.version = None

    def _refit_begins(self, lane: _Lane, change: Transition, at: int, known: Attributes) -> OpenSpan:
        refit = self._refits.get(change.refit_id or "")
        inherited: Attributes = {}
        if refit is None:
            self._dropped("span", "unknown_refit")
        else:
            shared = (names.WEIGHT_VERSION, names.TRANSPORT, names.REFIT_POLICY, names.REFIT_KIND)
            inherited = {name: refit.attributes[name] for name in shared if name in refit.attributes}
        if lane.version is not None:
            inherited[names.PREVIOUS_VERSION] = lane.version
        lane.outcome = "failed"
        parent = refit.span if refit is not None else None
        return self._pen.begin(names.REFIT_REPLICA, at, parent, self._common(change) | inherited | known)

    def _phase_begins(
        self, lane: _Lane, change: Transition, at: int, known: Attributes, begun_by: SpanContext | None
    ) -> OpenSpan | None:
        name = SPAN_OF.get(change.after)
        if name is None:
            return None
        attributes = self._common(change) | {names.REPLICA_STATE: change.after.value} | _about(known, change.after)
        if change.after is Phase.SERVING and lane.version is not None:
            attributes[names.WEIGHT_VERSION] = lane.version
        links = [] if begun_by is None else [Link(begun_by, {names.LINK_KIND: "begun_by"})]
        receives = change.after is Phase.RECEIVING
        if receives:
            links = self._sent_by(change.refit_id or "")
        parent = lane.refit.context if lane.refit is not None else None
        kind = SpanKind.CONSUMER if receives else SpanKind.INTERNAL
        return self._pen.begin(name, at, parent, attributes, kind, links)

    def _sent_by(self, refit_id: str) -> list[Link]:
        local, refit = self._work.get(f"send_weights:{refit_id}"), self._refits.get(refit_id)
        sender = local.context if local is not None else refit.sent_by if refit is not None else None
        return [] if sender is None else [Link(sender, {names.LINK_KIND: "sent_by"})]

    def _common(self, change: Transition) -> Attributes:
        common: Attributes = {names.REPLICA_ID: change.replica, names.REPLICA_INCARNATION: change.incarnation}
        if change.refit_id is not None:
            common[names.REFIT_ID] = change.refit_id
        if change.weight_version is not None:
            common[names.WEIGHT_VERSION] = change.weight_version
        return common


def _about(known: Attributes, phase: Phase | None) -> Attributes:
    """Leave out what is about another phase of the same replica."""
    name = SPAN_OF.get(phase) if phase is not None else None
    return {key: value for key, value in known.items() if names.BELONGS.get(key, name) == name}
