"""W3C trace context in plain dicts: how one trace runs through processes that share nothing but headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C: Final = TraceContextTextMapPropagator()
_FIELDS: Final = ("traceparent", "tracestate")
_EMPTY: Final = Context()


def inject(span: trace.SpanContext, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `headers` with `span` in the place of whatever span they named; as they were if it is none."""
    if not span.is_valid:
        return dict(headers or {})
    out = {key: value for key, value in (headers or {}).items() if key.lower() not in _FIELDS}
    _W3C.inject(out, trace.set_span_in_context(trace.NonRecordingSpan(span), _EMPTY))
    return out


def extract(headers: Mapping[str, str] | None) -> trace.SpanContext | None:
    """Return the span that `headers` name, whatever the case of their keys; None if they name none."""
    if not headers:
        return None
    if "traceparent" not in headers:
        headers = {key.lower(): value for key, value in headers.items()}
        if "traceparent" not in headers:
            return None
    found = trace.get_current_span(_W3C.extract(headers, _EMPTY)).get_span_context()
    return found if found.is_valid else None


def sampled(headers: Mapping[str, str]) -> bool | None:
    """Say whether the caller's trace is recorded; None if there is none. Cheap: asked for every request."""
    header = headers.get("traceparent") if headers else None
    if header is not None and len(header) == 55 and header[-1] in "0123456789abcdef":
        return bool(int(header[-1], 16) & 1)
    found = extract(headers) or current()
    return None if found is None else found.trace_flags.sampled


def under(parent: trace.SpanContext | None) -> Context:
    """Return a context with `parent` as the current span and nothing else: the ambient one never leaks in."""
    return _EMPTY if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent), _EMPTY)


def current() -> trace.SpanContext | None:
    """Return the span that is current in the calling task or thread, if any."""
    found = trace.get_current_span().get_span_context()
    return found if found.is_valid else None


def capture() -> dict[str, str]:
    """Return headers for the calling task's or thread's current span; empty if there is none."""
    found = current()
    return {} if found is None else inject(found)
