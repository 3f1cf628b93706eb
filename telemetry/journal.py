"""Reads the journals of a run: lines of OTLP JSON become rows. Standard library only.

A process that was killed leaves half a line at the end, and a full disk leaves one in the middle: such lines are
counted and skipped, never an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

Value = str | bool | int | float | tuple["Value", ...] | None

_KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")
_STATUS: Final = ("unset", "ok", "error")
_NONE: Final[Mapping[str, Value]] = {}


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that a span has to do with."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span. Ids are lower-case hex, times nanoseconds since the epoch; `parent` is a span id."""

    trace_id: str
    span_id: str
    parent: str | None
    name: str
    kind: str
    start: int
    end: int
    attributes: Mapping[str, Value]
    resource: Mapping[str, Value]
    scope: str = ""
    status: str = "unset"
    links: tuple[Link, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9

    @property
    def error(self) -> str | None:
        """What made it fail, if it failed."""
        return str(self.attributes.get("error.type", "_OTHER")) if self.status == "error" else None


@dataclass(frozen=True, slots=True)
class Journal:
    """The spans of a run, by start, and how many lines could not be read."""

    spans: tuple[Span, ...]
    torn: int = 0

    def named(self, name: str) -> list[Span]:
        """Return the spans of that name."""
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        """Return the spans right beneath `parent`."""
        return [span for span in self.spans if span.parent == parent.span_id and span.trace_id == parent.trace_id]


def read(path: str | os.PathLike[str]) -> Journal:
    """Read a journal, or all of a run's folder."""
    found, spans, torn = Path(path), [], 0
    for file in sorted(found.glob("*.jsonl")) if found.is_dir() else [found]:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    spans += parse(line)
                except (ValueError, TypeError, KeyError, AttributeError, IndexError):
                    torn += 1
    return Journal(tuple(sorted(spans, key=lambda span: (span.start, -span.end))), torn)


def parse(line: str) -> list[Span]:
    """Return the spans of one line; none if it holds something else.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, IndexError: it is not a line of OTLP JSON.
    """
    if not line.strip():
        return []
    return list(_spans(json.loads(line)))


def _spans(message: Mapping[str, Any]) -> Iterator[Span]:
    for process in message.get("resourceSpans", ()):
        resource = _attributes(process.get("resource", {}).get("attributes", ()))
        for scoped in process.get("scopeSpans", ()):
            scope = scoped.get("scope", {}).get("name", "")
            for raw in scoped.get("spans", ()):
                yield _span(raw, resource, scope)


def _span(raw: Mapping[str, Any], resource: Mapping[str, Value], scope: str) -> Span:
    return Span(
        trace_id=raw["traceId"].lower(),
        span_id=raw["spanId"].lower(),
        parent=raw.get("parentSpanId", "").lower() or None,
        name=raw["name"],
        kind=_KINDS[int(raw.get("kind", 0))],
        start=int(raw["startTimeUnixNano"]),
        end=int(raw["endTimeUnixNano"]),
        attributes=_attributes(raw.get("attributes", ())),
        resource=resource,
        scope=scope,
        status=_STATUS[int(raw.get("status", {}).get("code", 0))],
        links=tuple(
            Link(link["traceId"].lower(), link["spanId"].lower(), _attributes(link.get("attributes", ())))
            for link in raw.get("links", ())
        ),
    )


def _attributes(pairs: Iterable[Mapping[str, Any]]) -> Mapping[str, Value]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in pairs} or _NONE


def _value(raw: Mapping[str, Any]) -> Value:
    for kind, value in raw.items():
        if kind == "intValue":  # a string: JSON's numbers do not hold 64 bits
            return int(value)
        if kind == "doubleValue":
            return float(value)
        if kind == "arrayValue":
            return tuple(_value(item) for item in value.get("values", ()))
        if kind in ("stringValue", "boolValue"):
            return value if isinstance(value, bool) else str(value)
    return None
