"""OpenTelemetry's SDK, as this package uses it. Imported by `configure` only: the SDK is heavy."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.file import FileMetricExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, DEFAULT_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from pitstop.telemetry import names
from pitstop.telemetry.outbox import Lines


class Everything(Sampler):
    """Records what it is asked to.

    Pitstop's own spans were chosen before they began. Foreign ones follow their parent, except that vLLM's
    `llm_request` without a parent is the request of a caller who was not chosen: recorded, it would be an orphan.
    """

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide."""
        if name == "llm_request" and not trace.get_current_span(parent_context).get_span_context().is_valid:
            return SamplingResult(Decision.DROP)
        rule = ALWAYS_ON if name.startswith("rl.") else DEFAULT_ON
        return rule.should_sample(parent_context, trace_id, name, kind, attributes, links)

    def get_description(self) -> str:
        """Name it."""
        return "pitstop"


class Relay(SpanProcessor):
    """Passes on to `target`, which may change: the process's provider can be set once, telemetry turned on often."""

    target: SpanProcessor | None = None

    def on_end(self, span: ReadableSpan) -> None:
        """Pass on."""
        if self.target is not None:
            self.target.on_end(span)

    def force_flush(self, timeout_millis: int = 2_000) -> bool:
        """Pass on."""
        return self.target is None or self.target.force_flush(timeout_millis)


class NumbersExporter(MetricExporter):
    """Appends what is collected to a journal and passes it on."""

    def __init__(self, path: Path | None, pass_on: Callable[[MetricsData], None] | None = None) -> None:
        super().__init__()
        self._file = None if path is None else Lines(path)
        self._pass_on = pass_on

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Append one line."""
        if self._pass_on is not None:
            self._pass_on(metrics_data)
        if self._file is None:
            return MetricExportResult.SUCCESS
        lines = io.StringIO()
        result = FileMetricExporter(stream=lines).export(metrics_data)
        self._file.write(lines.getvalue())
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing is ever held back."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Close the journal."""
        if self._file is not None:
            self._file.close()


RELAY = Relay()
"""Where spans of others in this process go, vLLM's above all, when they use the provider that is ours."""

_shared: list[TracerProvider] = []


def resource(role: str, instance: str, run_id: str) -> Resource:
    """Describe this process. Not `Resource.create`, whose detectors start threads."""
    return Resource(
        {names.SERVICE_NAME: "pitstop", names.SERVICE_INSTANCE_ID: instance, names.RUN_ID: run_id, names.ROLE: role}
    )


def make(described: Resource, processor: SpanProcessor) -> TracerProvider:
    """Make a provider that hands everything to `processor`."""
    provider = TracerProvider(Everything(), described, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def attach(provider: trace.TracerProvider, processor: SpanProcessor) -> None:
    """Let a provider of the program's own write to `processor` as well, if it is the SDK's."""
    if isinstance(provider, TracerProvider):
        provider.add_span_processor(processor)


def foreign() -> trace.TracerProvider | None:
    """Return the provider that the program has set, if it has."""
    provider = trace.get_tracer_provider()
    ours = isinstance(provider, trace.ProxyTracerProvider) or provider in _shared
    return None if ours else provider


def share(described: Resource, processor: SpanProcessor) -> None:
    """Let spans of others in this process go to `processor` too."""
    RELAY.target = processor
    if not _shared:
        _shared.append(make(described, RELAY))
        trace.set_tracer_provider(_shared[0])


def meter(
    described: Resource, path: Path | None, pass_on: Callable[[MetricsData], None] | None = None
) -> tuple[Meter, Callable[[], None]]:
    """Return a meter, and what brings its numbers to `path` and `pass_on`. The program's own provider comes first."""
    provider = metrics.get_meter_provider()
    if isinstance(provider, MeterProvider):
        return provider.get_meter(names.SCOPE), lambda: None
    if path is None and pass_on is None:
        return metrics.NoOpMeterProvider().get_meter(names.SCOPE), lambda: None
    # Without an interval the reader has no thread of its own.
    reader = PeriodicExportingMetricReader(NumbersExporter(path, pass_on), math.inf)
    own = MeterProvider([reader], described, shutdown_on_exit=False)
    return own.get_meter(names.SCOPE), reader.collect
