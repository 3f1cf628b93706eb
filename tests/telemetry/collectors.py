"""Collectors on loopback: healthy ones, and those that are dead, slow or lie."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Reply:
    """What a collector says. `kind` is the Content-Type; `raw` replaces the whole answer, HTTP included."""

    status: int = 200
    body: bytes = b""
    kind: str = PROTOBUF
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None


def partial(rejected: int) -> Reply:
    """An answer that takes all but `rejected` spans."""
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = rejected
    answer.partial_success.error_message = "too old"
    return Reply(body=answer.SerializeToString())


def everything(path: str) -> Reply:
    """A healthy collector's answer."""
    answer = ExportMetricsServiceResponse() if path.endswith("metrics") else ExportTraceServiceResponse()
    return Reply(body=answer.SerializeToString())


class Collector:
    """A server, and what has arrived there. `reply` may be changed at any time."""

    def __init__(self, reply: Callable[[str], Reply] = everything) -> None:
        self.reply = reply
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                said = outer.reply(self.path)
                if said.raw is not None:
                    self.wfile.write(said.raw)
                    self.close_connection = True
                    return
                self.send_response(said.status)
                for name, value in said.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", said.kind)
                self.send_header("Content-Length", str(len(said.body)))
                self.end_headers()
                self.wfile.write(said.body)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away is what some tests are about."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Any]:
        """All spans that arrived, decoded."""
        return [
            span
            for path, _, body in list(self.requests)
            if path.endswith("/v1/traces")
            for process in ExportTraceServiceRequest.FromString(body).resource_spans
            for scoped in process.scope_spans
            for span in scoped.spans
        ]

    def names(self) -> Counter[str]:
        """How many spans of each name arrived."""
        return Counter(span.name for span in self.spans())

    def numbers(self) -> dict[str, Any]:
        """The newest state of each metric that arrived, decoded."""
        return {
            metric.name: metric
            for path, _, body in list(self.requests)
            if path.endswith("/v1/metrics")
            for process in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scoped in process.scope_metrics
            for metric in scoped.metrics
        }


@contextmanager
def running(reply: Callable[[str], Reply] = everything) -> Iterator[Collector]:
    """A collector that answers as `reply` says."""
    collector = Collector(reply)
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        collector.released.set()
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


@contextmanager
def dead() -> Iterator[str]:
    """The address of a collector that is not there: connections are refused."""
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port meanwhile
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def slow() -> Iterator[Collector]:
    """A collector that takes requests and never answers."""

    def never(path: str) -> Reply:
        collector.released.wait(60)
        return Reply(503)

    with running(never) as collector:
        yield collector
