from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags, TraceState

from pitstop.telemetry import context
from tests.telemetry.builders import Recorder

contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.just(True),
    st.sampled_from([TraceFlags(0), TraceFlags(1)]),
    st.sampled_from([TraceState(), TraceState([("vendor", "x")])]),
)


@given(contexts, st.dictionaries(st.sampled_from(["baggage", "x", "TraceParent", "tracestate"]), st.text()))
def test_headers_carry_a_span_and_leave_the_rest_alone(span: SpanContext, headers: dict[str, str]) -> None:
    sent = context.inject(span, headers)
    found = context.extract(sent)
    assert found is not None
    assert (found.trace_id, found.span_id, found.trace_flags) == (span.trace_id, span.span_id, span.trace_flags)
    assert found.trace_state == span.trace_state
    assert found.is_remote
    assert context.sampled(sent) is span.trace_flags.sampled
    assert {k: sent[k] for k in ("baggage", "x") if k in headers} == {
        k: v for k, v in headers.items() if k in ("baggage", "x")
    }


@pytest.mark.parametrize("header", ["", "junk", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\ud800", "00-1-2-3"])
def test_a_header_that_names_nothing_is_no_parent(header: str) -> None:
    assert context.extract({"traceparent": header}) is None


@given(st.dictionaries(st.text(), st.text()))
def test_any_headers_are_survived(headers: dict[str, str]) -> None:
    context.extract(headers)
    context.sampled(headers)


def test_no_span_takes_no_ones_place() -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert context.inject(INVALID_SPAN_CONTEXT, headers) == headers


def test_capture_names_the_current_span_and_nothing_without_one() -> None:
    assert context.capture() == {}
    with Recorder().tracer.start_as_current_span("step") as span:
        found = context.extract(context.capture())
    assert found is not None
    assert found.span_id == span.get_span_context().span_id
