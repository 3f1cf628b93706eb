"""OTLP over HTTP, by OpenTelemetry's own exporters: the extra `otlp`. Imported by `configure` only.

The exporters make the message and read the standard environment (headers, certificates, compression, timeout). Their
retries would hold the thread for as long as a collector is down, their log has a line for every request, and they take
any 2xx for a success; so requests go through a session that judges the answer, and failures end there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from http.client import HTTPException, RemoteDisconnected
from typing import Any, Final

import requests
import urllib3
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan

from pitstop.telemetry.collector import THREAD, Answer
from pitstop.telemetry.endpoint import ENV

_RETRYABLE: Final = frozenset({429, 502, 503, 504})
_LONGEST_ANSWER: Final = 65_536
_LOGS: Final = tuple(f"opentelemetry.exporter.otlp.proto.http.{signal}_exporter" for signal in ("trace", "metric"))


class Undelivered(Exception):
    """Ends a request of the exporter's that failed, so that it does not try again."""


class Unreadable(Exception):
    """Raised when an answer is no OTLP."""


class JudgingSession(requests.Session):
    """Sends the exporter's requests and keeps what came of the last."""

    def __init__(self, rejected: Callable[[str, bytes], int]) -> None:
        super().__init__()
        self.headers["Accept-Encoding"] = "identity"
        self.limit = float("inf")
        self.answer: Answer | None = None
        self._rejected = rejected

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """Send.

        Raises:
            Undelivered: the collector has not taken it.
        """
        timeout = options.get("timeout")
        options["timeout"] = min(timeout if isinstance(timeout, int | float) else 10.0, self.limit)
        options |= {"stream": True, "allow_redirects": False}
        try:
            with super().request(*args, **options) as response:
                self.answer = self._judge(response)
        except Exception as error:  # noqa: BLE001
            self.answer = _failed(error)
        if self.answer.reason is not None and self.answer.lost is None:
            raise Undelivered(self.answer.reason)
        return response

    def _judge(self, response: requests.Response) -> Answer:
        status = response.status_code
        if not 200 <= status < 300:
            after = response.headers.get("Retry-After", "")
            wait = float(after) if after.isascii() and after.isdigit() else 0.0
            return Answer(f"http_{status}", again=status in _RETRYABLE, after=wait)
        body = response.raw.read(_LONGEST_ANSWER + 1, decode_content=False)
        if len(body) > _LONGEST_ANSWER or response.headers.get("Content-Encoding", "identity") != "identity":
            raise Unreadable
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        try:
            rejected = self._rejected(kind, body) if body else 0
        except Exception as error:
            raise Unreadable from error
        return Answer("rejected", rejected) if rejected > 0 else Answer()


class OtlpPost:
    """The way to the collector at `endpoint`, a base URL, or as the environment says."""

    def __init__(self, endpoint: str) -> None:
        for name in _LOGS:
            logging.getLogger(name).addFilter(_not_ours)
        base = None if endpoint == ENV else endpoint.rstrip("/")
        self._for_spans = JudgingSession(_rejected_spans)
        self._for_numbers = JudgingSession(_rejected_points)
        self._spans = OTLPSpanExporter(base and f"{base}/v1/traces", session=self._for_spans)
        self._numbers = OTLPMetricExporter(base and f"{base}/v1/metrics", session=self._for_numbers)

    def spans(self, batch: Sequence[ReadableSpan], timeout: float) -> Answer:
        """Send spans."""
        return _answer(self._for_spans, lambda: self._spans.export(batch), timeout)

    def numbers(self, data: MetricsData, timeout: float) -> Answer:
        """Send what was collected."""
        return _answer(self._for_numbers, lambda: self._numbers.export(data), timeout)

    def close(self) -> None:
        """Give back connections."""
        self._for_spans.close()
        self._for_numbers.close()


def _answer(session: JudgingSession, export: Callable[[], object], timeout: float) -> Answer:
    session.limit, session.answer = timeout, None
    try:
        export()
    except Exception:  # noqa: BLE001
        return Answer("exporter_failed")
    return session.answer or Answer("exporter_failed")


def _failed(error: Exception) -> Answer:
    """Name what went wrong. Something other than a collector may be at that address, and answer in its own way.

    What has been answered at all is not sent again, however odd the answer: it may have arrived.
    """
    if isinstance(error, requests.Timeout):
        return Answer("timeout", again=True)
    if isinstance(error, urllib3.exceptions.TimeoutError):
        return Answer("timeout")
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, HTTPException) and not isinstance(seen, RemoteDisconnected):
            return Answer("unreadable_answer")
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, requests.ConnectionError):
        return Answer("unreachable", again=True)
    if isinstance(error, Unreadable | urllib3.exceptions.HTTPError):
        return Answer("unreadable_answer")
    return Answer("exporter_failed")


def _rejected_spans(kind: str, body: bytes) -> int:
    if kind == "application/json":
        return _rejected_in_json(body, "rejectedSpans")
    if kind != "application/x-protobuf":
        raise Unreadable
    return int(ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans)


def _rejected_points(kind: str, body: bytes) -> int:
    if kind == "application/json":
        return _rejected_in_json(body, "rejectedDataPoints")
    if kind != "application/x-protobuf":
        raise Unreadable
    return int(ExportMetricsServiceResponse.FromString(body).partial_success.rejected_data_points)


def _rejected_in_json(body: bytes, key: str) -> int:
    return int((json.loads(body).get("partialSuccess") or {}).get(key, 0))


def _not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != THREAD
