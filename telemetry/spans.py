"""How a span begins and ends here: explicit parent, explicit times, declared attributes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from pitstop.engine.ports import Scalar
from pitstop.telemetry import context, names

Drop = Callable[[str, str], None]
"""Is told what is lost, and why: `(signal, reason)`."""

Attributes = dict[str, Scalar | tuple[str, ...]]

_SLUG: Final = re.compile(r"[A-Za-z0-9_.]{1,64}")
_MOST_OPEN: Final = 100_000


def slug(error: str) -> str:
    """Return `error` if it may be an `error.type`: a short name. A message would be a new value at every failure."""
    return error if _SLUG.fullmatch(error) else names.OTHER_ERROR


@dataclass(slots=True)
class OpenSpan:
    """A span that has begun. `error` is what made it fail before it ended."""

    span: trace.Span
    start: int
    error: str | None = None

    @property
    def context(self) -> SpanContext:
        """What names the span elsewhere."""
        return self.span.get_span_context()

    def end(self, at: int, error: str | None = None, attributes: Attributes | None = None) -> None:
        """End it, never before it began."""
        if attributes:
            self.span.set_attributes(attributes)
        error = error or self.error
        if error is not None:
            self.span.set_attribute(names.ERROR_TYPE, slug(error))
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end(max(at, self.start))

    def cut(self, at: int) -> None:
        """End it because nobody else will."""
        self.end(at, None, {names.TRUNCATED: True})


@dataclass(slots=True)
class Pen:
    """Begins spans with one tracer."""

    tracer: trace.Tracer
    dropped: Drop

    def begin(
        self,
        name: str,
        at: int,
        parent: SpanContext | None,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> OpenSpan:
        """Begin a span under `parent`, or a new trace without one."""
        span = self.tracer.start_span(name, context.under(parent), kind, attributes, links, start_time=at)
        return OpenSpan(span, at)

    def attributes(self, detail: Mapping[str, Scalar] | None) -> Attributes:
        """Translate details; what has no declared name is dropped, and that is counted."""
        found: Attributes = {}
        for key, value in (detail or {}).items():
            name = names.DETAILS.get(key)
            if name is not None:
                found[name] = (str(value),) if name == names.GENAI_FINISH_REASONS else value
            elif key not in names.UNWRITTEN:
                self.dropped("attribute", "unknown_detail")
        return found


@dataclass(slots=True)
class Bench:
    """Spans of work in progress, by key. Bounded: a driver that forgets to close costs spans, not memory."""

    dropped: Drop
    most: int = _MOST_OPEN
    _open: dict[str, OpenSpan] = field(default_factory=dict)

    def put(self, key: str, span: OpenSpan) -> None:
        """Keep `span`; an older one of the same key, or the oldest where there are too many, is cut short."""
        victim, reason = self._open.pop(key, None), "duplicate_key"
        if victim is None and len(self._open) >= self.most:
            victim, reason = self._open.pop(next(iter(self._open))), "too_many_open"
        if victim is not None:
            self.dropped("span", reason)
            victim.cut(span.start)
        self._open[key] = span

    def get(self, key: str | None) -> OpenSpan | None:
        """Look at what is open under `key`."""
        return self._open.get(key) if key is not None else None

    def take(self, key: str) -> OpenSpan | None:
        """Hand out what is open under `key`, for its end."""
        return self._open.pop(key, None)

    def cut(self, at: int) -> None:
        """Cut everything short."""
        for key in list(self._open):
            span = self._open.pop(key, None)
            if span is not None:
                span.cut(at)
