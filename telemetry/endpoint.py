"""Where a collector is, and whether there is a way to it: asked before anything is begun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pitstop.engine.errors import LocalError

if TYPE_CHECKING:
    from pitstop.telemetry.collector import Post

ENV: Final = "env"

_BASE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_EACH: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_PROTOCOLS: Final = tuple(f"OTEL_EXPORTER_OTLP_{signal}PROTOCOL" for signal in ("", "TRACES_", "METRICS_"))


class ExporterMissing(LocalError):
    """Raised when an endpoint is given and the packages of the extra `otlp` are not installed."""

    slug = "exporter_missing"


def connector(endpoint: str) -> Callable[[], Post]:
    """Return what makes a way to the collector.

    Raises:
        ExporterMissing: the extra `otlp` is not installed.
    """
    try:
        from pitstop.telemetry.otlp import OtlpPost
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pitstop"):
            raise
        raise ExporterMissing(
            f"endpoint: {error.name} is not installed; it comes with the extra otlp: "
            "pip install opentelemetry-exporter-otlp-proto-http"
        ) from error
    return lambda: OtlpPost(endpoint)


def trouble(endpoint: str) -> str | None:
    """Say what is wrong with `endpoint`, if anything is."""
    if endpoint == ENV:
        if not os.environ.get(_BASE) and not all(os.environ.get(name) for name in _EACH):
            return f"endpoint 'env': {_BASE} is not set"
        for name in _PROTOCOLS:
            if os.environ.get(name, "http/protobuf") != "http/protobuf":
                return f"endpoint 'env': {name} is {os.environ[name]!r}; only http/protobuf is spoken"
        return None
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018
    except ValueError as error:
        return f"endpoint {endpoint!r}: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        return f"endpoint {endpoint!r} is neither 'env' nor a base URL such as http://localhost:4318"
    if parts.path.rstrip("/").endswith(("/v1/traces", "/v1/metrics")):
        return f"endpoint {endpoint!r}: the path of a signal is added to it; leave that away"
    return None


def whereabouts(endpoint: str) -> str:
    """Return `endpoint` as a log may have it: without a name and password."""
    if endpoint == ENV:
        return ENV
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
