"""Turns what the engine says into instruments.

The engine's loop pays for an append: numbers wait in a deque until `fold` (the outbox's thread, or a collection) adds
them up. Recording them at once would cost a request 40 us, more than all the rest of its telemetry.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Final, TypeVar

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Scalar, Transition, Work
from pitstop.telemetry import names
from pitstop.telemetry.observer import REFITTING, failure
from pitstop.telemetry.spans import slug

_K = TypeVar("_K")
_V = TypeVar("_V")
Labels = tuple[tuple[str, Scalar], ...]

_MOST_PENDING: Final = 200_000
_MOST_OPEN: Final = 100_000
_REMEMBERED: Final = 4096
_BREATH: Final = 128


class Instruments:
    """The metrics of one process."""

    def __init__(self, meter: Meter) -> None:
        self._pending: deque[tuple[str, float, Labels]] = deque()
        self._lost = 0
        self._folding = threading.Lock()
        self._muted = False
        self._replicas: dict[str, tuple[int, Phase, int]] = {}
        self._work: dict[str, Work] = {}
        self._transports: dict[str, Scalar] = {}
        self._staged: dict[tuple[str, str], None] = {}
        self._models: dict[tuple[Scalar | None, ...], Labels] = {}
        self._sums: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in names.METRICS.values():
            if metric.kind == "histogram":
                self._histograms[metric.name] = meter.create_histogram(
                    metric.name, metric.unit, metric.about, explicit_bucket_boundaries_advisory=metric.buckets
                )
                continue
            sums = self._sums[metric.name] = {}
            make = meter.create_observable_counter if metric.kind == "counter" else (
                meter.create_observable_up_down_counter
            )  # fmt: skip
            make(metric.name, [self._observing(sums)], metric.unit, metric.about)

    def mute(self) -> None:
        """Record losses only: after a fork, what was added up belongs to the parent."""
        self._muted = True
        self._lost = 0
        self._pending.clear()
        self._sums[names.DROPPED].clear()
        self._folding = threading.Lock()  # some thread of the parent's may have held it

    def transition(self, change: Transition) -> None:
        """Count it, and time the phase that was left."""
        known = self._replicas.get(change.replica)
        incarnation, phase, since = known or (change.incarnation, None, change.at)
        if change.incarnation < incarnation or phase is change.after:
            return
        if phase is not None:
            self._put(names.STATUS, -1, ((names.REPLICA_STATE, phase.value),))
        self._put(names.STATUS, 1, ((names.REPLICA_STATE, change.after.value),))
        moved = ((names.FROM, change.before.value), (names.TO, change.after.value))
        self._put(names.TRANSITIONS, 1, moved)
        self._replicas[change.replica] = (change.incarnation, change.after, change.at)
        if change.refit_id is None or phase is not change.before or phase not in REFITTING:
            return
        transport = self._transport(change.detail, change.refit_id)
        error = failure(change)
        failed = () if error is None else ((names.ERROR_TYPE, slug(error)),)
        seconds = max(0, change.at - since) / 1e9
        self._put(names.PHASE_DURATION, seconds, ((names.REFIT_PHASE, REFITTING[phase]), *transport, *failed))
        # What was staged has been counted when it arrived.
        if change.event == "WeightsLanded" and (change.refit_id, change.replica) not in self._staged:
            self._moved(change.detail, transport, "received")

    def opened(self, work: Work) -> Mapping[str, str]:
        """Remember when it began."""
        if len(self._work) >= _MOST_OPEN:
            self._work.pop(next(iter(self._work)), None)
            self.dropped("metric", "too_many_open")
        if work.kind == "generate":
            if work.key not in self._work:
                self._put(names.REQUESTS_ACTIVE, 1, ())
        elif work.kind == "refit":
            self._transport(work.detail, work.key.partition(":")[2])
        self._work[work.key] = work
        return work.headers

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """Record how long it took and what came of it."""
        work = self._work.pop(key, None)
        if work is None:
            return
        detail = detail or {}
        seconds = max(0, at - work.at) / 1e9
        failed: Labels = () if error is None else ((names.ERROR_TYPE, slug(error)),)
        if work.kind == "generate":
            self._generated(work, seconds, failed, detail)
            return
        refit_id, _, replica = key.partition(":")[2].partition(":")
        transport = self._transport(detail, refit_id, work.detail)
        if work.kind == "refit":
            outcome = detail.get("outcome", "failed" if failed else "committed")
            labels = (*transport, (names.REFIT_OUTCOME, outcome), *failed)
            self._put(names.REFIT_DURATION, seconds, labels)
        elif work.kind == "stage":
            self._put(names.PHASE_DURATION, seconds, ((names.REFIT_PHASE, "stage"), *transport, *failed))
            if self._moved(detail, transport, "received"):
                self._staged[refit_id, replica] = None
                _bound(self._staged)
        elif work.kind == "send_weights" and error is None:
            self._moved({**work.detail, **detail}, transport, "sent")

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        """Add a number to the metric of that name."""
        metric = names.METRICS.get(name)
        if metric is None or not isinstance(value, int | float) or not isfinite(value):
            self.dropped("metric", "unknown_name" if metric is None else "not_a_number")
            return
        known = {names.DETAILS.get(key, key): item for key, item in (detail or {}).items()}
        self._put(name, value, tuple((label, known[label]) for label in metric.attributes if label in known))

    def dropped(self, signal: str, reason: str, count: int = 1) -> None:
        """Count what telemetry lost."""
        self._put(names.DROPPED, count, ((names.SIGNAL, signal), (names.REASON, reason)))

    def losses(self) -> dict[tuple[str, str], int]:
        """Return what telemetry lost so far, by signal and reason, of what has been folded."""
        return {
            (str(signal), str(reason)): int(count)
            for ((_, signal), (_, reason)), count in sorted(self._sums[names.DROPPED].items())
        }

    def fold(self) -> bool:
        """Add up what is pending; return whether there was any. One thread at a time: others return at once."""
        if not self._folding.acquire(blocking=False):
            return False
        try:
            count = len(self._pending)
            for done in range(1, count + 1):
                self._add(*self._pending.popleft())
                if done % _BREATH == 0:
                    time.sleep(0)  # lets the event loop's thread in
            lost, self._lost = self._lost, 0
            if lost:
                self._put(names.DROPPED, lost, ((names.SIGNAL, "metric"), (names.REASON, "too_many_pending")))
            return count > 0
        finally:
            self._folding.release()

    def _add(self, name: str, value: float, labels: Labels) -> None:
        if name in self._histograms:
            self._histograms[name].record(value, dict(labels))
        else:
            sums = self._sums[name]
            sums[labels] = sums.get(labels, 0) + value

    def _generated(self, work: Work, seconds: float, failed: Labels, detail: Mapping[str, Scalar]) -> None:
        began = work.detail
        key = (began.get("operation"), began.get("provider"), began.get("model"))
        labels = self._models.get(key)
        if labels is None:
            found = zip((names.GENAI_OPERATION, names.GENAI_PROVIDER, names.GENAI_MODEL), key, strict=True)
            labels = self._models[key] = tuple((name, value) for name, value in found if value is not None)
        finish = detail.get("finish_reason", "error" if failed else "stop")
        self._put(names.REQUESTS_ACTIVE, -1, ())
        self._put(names.REQUESTS, 1, ((names.FINISH, finish), *failed))
        self._put(names.INFERENCE_DURATION, seconds, labels + failed)
        tokens, first = detail.get("output_tokens"), detail.get("first_token_at")
        for value, name in (
            (began.get("prompt_tokens"), names.INFERENCE_INPUT),
            (tokens, names.INFERENCE_OUTPUT),
        ):
            if isinstance(value, int):
                self._put(name, value, labels)
        if isinstance(first, int):
            waited = max(0, first - work.at) / 1e9
            self._put(names.INFERENCE_FIRST_CHUNK, waited, labels)
            if isinstance(tokens, int) and tokens > 1:
                self._put(names.INFERENCE_PER_CHUNK, max(0.0, seconds - waited) / (tokens - 1), labels)

    def _moved(self, detail: Mapping[str, Scalar], transport: Labels, direction: str) -> bool:
        nbytes = detail.get("bytes")
        if not isinstance(nbytes, int):
            return False
        self._put(names.TRANSFER_BYTES, nbytes, (*transport, (names.TRANSFER_DIRECTION, direction)))
        return True

    def _transport(
        self, detail: Mapping[str, Scalar], refit_id: str, began: Mapping[str, Scalar] | None = None
    ) -> Labels:
        """Find a refit's transport: said now, when this began, or by any other part of the refit."""
        name = detail.get("transport") or (began or {}).get("transport")
        if name is None:
            name = self._transports.get(refit_id)
        else:
            self._transports[refit_id] = name
            _bound(self._transports)
        return () if name is None else ((names.TRANSPORT, name),)

    def _put(self, name: str, value: float, labels: Labels) -> None:
        if self._muted and name != names.DROPPED:
            return
        if len(self._pending) >= _MOST_PENDING:
            self._lost += 1
            return
        self._pending.append((name, value, labels))

    def _observing(self, sums: dict[Labels, float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            self.fold()
            return [Observation(value, dict(labels)) for labels, value in list(sums.items())]

        return observe


def _bound(kept: dict[_K, _V]) -> None:
    """Forget the oldest entries."""
    while len(kept) > _REMEMBERED:
        kept.pop(next(iter(kept)))
