"""Spans, metrics and journals: what happened, and where the time went."""

if __name__ == "telemetry":
    raise ImportError("import pitstop.telemetry, not telemetry: the repository root is on sys.path")

from pitstop.telemetry.endpoint import ExporterMissing
from pitstop.telemetry.setup import AlreadyConfigured, Telemetry, configure

__all__ = ["AlreadyConfigured", "ExporterMissing", "Telemetry", "configure"]
