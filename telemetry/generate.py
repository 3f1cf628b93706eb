"""Spans of requests: few of them, chosen so that the ones one looks for are there.

Recorded are requests whose caller's trace is sampled, a fraction of those that belong to no trace, and every request
that was held by a refit or failed. The last is known only at the end, so what such a span would need waits, as the
plain data that came in, and the span is made after the fact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from pitstop.engine.ports import Scalar, Work
from pitstop.telemetry import context, names
from pitstop.telemetry.spans import Bench, OpenSpan, Pen

_MOST_WAITING: Final = 100_000


class RequestSpans:
    """The `rl.generate` spans of one process."""

    def __init__(self, pen: Pen, sample: float, draw: Callable[[], float] = random.random) -> None:
        self._pen = pen
        self._sample = sample
        self._draw = draw
        self._open = Bench(pen.dropped)
        self._waiting: dict[str, Work] = {}

    def opened(self, work: Work) -> Mapping[str, str]:
        """Return headers that name the request's span if it is to be recorded for sure, else the caller's."""
        chosen = context.sampled(work.headers)
        if chosen is None:
            chosen = self._draw() < self._sample
        if chosen:
            span = self._begin(work)
            self._open.put(work.key, span)
            return context.inject(span.context, work.headers)
        if work.key in self._waiting:
            self._pen.dropped("span", "duplicate_key")
        elif len(self._waiting) >= _MOST_WAITING:
            self._pen.dropped("span", "too_many_open")
            self._waiting.pop(next(iter(self._waiting)), None)
        self._waiting[work.key] = work
        return work.headers

    def closed(self, key: str, at: int, error: str | None, detail: Mapping[str, Scalar] | None) -> None:
        """End the request's span; make one if it turns out to be worth it."""
        work = self._waiting.pop(key, None)
        if work is not None:
            if error is not None or (detail and (detail.get("holds") or detail.get("finish_reason") == "error")):
                self._end(self._begin(work), at, error, detail)
            return
        span = self._open.take(key)
        if span is None:
            self._pen.dropped("span", "unknown_key")
        else:
            self._end(span, at, error, detail)

    def cut(self, at: int) -> None:
        """End what is open: the process ends before it does."""
        self._open.cut(at)
        self._waiting.clear()

    def _begin(self, work: Work) -> OpenSpan:
        attributes = self._pen.attributes(work.detail)
        attributes.setdefault(names.REQUEST_ID, work.key.partition(":")[2])
        parent = context.extract(work.headers) or context.current()
        return self._pen.begin(names.GENERATE, work.at, parent, attributes)

    def _end(self, span: OpenSpan, at: int, error: str | None, detail: Mapping[str, Scalar] | None) -> None:
        if error is None and detail and detail.get("finish_reason") == "error":
            error = names.OTHER_ERROR
        attributes = self._pen.attributes(detail)
        first = detail.get("first_token_at") if detail else None
        if isinstance(first, int):
            attributes[names.GENAI_FIRST_CHUNK] = max(0, first - span.start) / 1e9
        span.end(at, error, attributes)
