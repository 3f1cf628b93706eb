from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.telemetry import journal


def line(name: str = "rl.refit", **more: object) -> str:
    span = {
        "traceId": "AB" * 16, "spanId": "cd" * 8, "name": name, "kind": 5,
        "startTimeUnixNano": "1700000000000000001", "endTimeUnixNano": "1700000001500000001", **more,
    }  # fmt: skip
    resource = {"attributes": [{"key": "rl.role", "value": {"stringValue": "fleet"}}]}
    scope = {"scope": {"name": "pitstop"}, "spans": [span]}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}) + "\n"


def test_a_line_becomes_rows(tmp_path: Path) -> None:
    file = tmp_path / "fleet-1.jsonl"
    file.write_text(
        line(
            parentSpanId="EF" * 8,
            status={"code": 2},
            attributes=[
                {"key": "big", "value": {"intValue": "9007199254740993"}},
                {"key": "ratio", "value": {"doubleValue": 0.5}},
                {"key": "yes", "value": {"boolValue": True}},
                {"key": "error.type", "value": {"stringValue": "peer_lost"}},
                {"key": "list", "value": {"arrayValue": {"values": [{"stringValue": "stop"}]}}},
                {"key": "nothing", "value": {}},
            ],
            links=[{"traceId": "12" * 16, "spanId": "34" * 8}],
        )
    )
    (span,) = journal.read(file).spans
    assert span == journal.Span(
        "ab" * 16, "cd" * 8, "ef" * 8, "rl.refit", "consumer", 1700000000000000001, 1700000001500000001,
        {"big": 9007199254740993, "ratio": 0.5, "yes": True, "error.type": "peer_lost", "list": ("stop",),
         "nothing": None},
        {"rl.role": "fleet"}, "pitstop", "error", (journal.Link("12" * 16, "34" * 8),),
    )  # fmt: skip
    assert (span.seconds, span.error) == (1.5, "peer_lost")


@given(st.integers(0, len(line("second")) - 2))
def test_a_torn_last_line_costs_nothing_but_itself(cut: int) -> None:
    second = line("second")[:cut]
    found = [span for text in (line("first"), second) for span in quietly(text)]
    assert [span.name for span in found] == ["first"]


def quietly(text: str) -> list[journal.Span]:
    try:
        return journal.parse(text)
    except ValueError:
        return []


@pytest.mark.parametrize("broken", ["{\n", "[]\n", "7\n", '{"resourceSpans": 7}\n', "\x00\x00\n", "\udcff\n"])
def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(line("first") + broken + "\n" + line("last") + line("torn")[:-40], errors="surrogateescape")
    found = journal.read(tmp_path)
    assert [span.name for span in found.spans] == ["first", "last"]
    assert found.torn == 2


def test_a_folder_is_read_whole_in_order_of_time_and_other_signals_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(line("late", startTimeUnixNano="1700000000000000002"))
    (tmp_path / "a.jsonl").write_text(line("early") + '{"resourceMetrics":[]}\n')
    found = journal.read(tmp_path)
    assert [span.name for span in found.spans] == ["early", "late"]
    assert found.torn == 0
    assert journal.read(tmp_path / "a.jsonl").named("early") == [found.spans[0]]
    assert found.children(found.spans[0]) == []
