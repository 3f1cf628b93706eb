"""Builders for what the engine says, and recorders of what telemetry makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanContext

from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Scalar, Transition, Work
from pitstop.telemetry.observer import SpanObserver

P = Phase

REFIT = (
    (P.SERVING, "RefitOffered", P.SUSPENDING),
    (P.SUSPENDING, "Suspended", P.RECEIVING),
    (P.RECEIVING, "WeightsLanded", P.FINALIZING),
    (P.FINALIZING, "Finalized", P.RESUMING),
    (P.RESUMING, "Resumed", P.SERVING),
)


class Recorder(SpanProcessor):
    """Keeps what has begun and what has ended."""

    def __init__(self) -> None:
        self.begun: list[Span] = []
        self.ended: list[ReadableSpan] = []
        provider = TracerProvider(ALWAYS_ON, shutdown_on_exit=False)
        provider.add_span_processor(self)
        self.tracer = provider.get_tracer("test")
        self.dropped: Counter[tuple[str, str]] = Counter()

    def on_start(self, span: Span, parent_context: object = None) -> None:
        self.begun.append(span)

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)

    def drop(self, signal: str, reason: str) -> None:
        self.dropped[signal, reason] += 1

    def observer(self, *, level: int = 1, sample: float = 0.0, draw: float = 0.5) -> SpanObserver:
        return SpanObserver(self.tracer, level=level, sample=sample, dropped=self.drop, draw=lambda: draw)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.ended if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def context(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def attributes(span: ReadableSpan) -> Mapping[str, object]:
    return dict(span.attributes or {})


def change(
    before: Phase,
    event: str,
    after: Phase,
    at: int,
    *,
    replica: str = "a",
    incarnation: int = 1,
    refit: str | None = None,
    version: int | None = None,
    error: str | None = None,
    **detail: Scalar,
) -> Transition:
    return Transition(replica, incarnation, before, event, after, at, refit, version, error, detail)


def refit_work(refit: str, at: int, headers: Mapping[str, str] | None = None, /, **detail: Scalar) -> Work:
    return Work("refit", f"refit:{refit}", at, None, headers or {}, detail)


def generate(request: str, at: int, headers: Mapping[str, str] | None = None, /, **detail: Scalar) -> Work:
    return Work("generate", f"generate:{request}", at, None, headers or {}, detail)


def whole_refit(refit: str, start: int, step: int = 10, **detail: Scalar) -> list[Transition]:
    """One replica's way through a refit that succeeds, a step apart."""
    return [
        Transition("a", 1, before, event, after, start + n * step, refit, 2, None, detail)
        for n, (before, event, after) in enumerate(REFIT)
    ]
