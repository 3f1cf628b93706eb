"""Export by OTLP/HTTP against real servers on loopback. Bounds in seconds here only say that nothing hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pitstop.engine.errors import LocalError, UnsupportedPolicy
from pitstop.engine.ports import NullObserver, default_observer
from pitstop.engine.refit import Outcome
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import Delays, SimulatedBackend
from pitstop.telemetry import ExporterMissing, configure, journal, names
from tests.engine.sim import SimFleet
from tests.telemetry.collectors import PROTOBUF, Reply, dead, everything, partial, running, slow
from tests.telemetry.exporting import work

ROOT = Path(__file__).resolve().parents[2]
HANGS = 20.0


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_spans_and_numbers_arrive_and_decode_and_the_journals_have_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as collector:
        with configure(tmp_path, role="trainer", run_id="r7", endpoint=collector.url) as telemetry:
            work("a")
            assert telemetry.flush(HANGS)
            assert collector.names() == {names.SEND_WEIGHTS: 5}
            work("b")
        written = {span.span_id for span in journal.read(tmp_path).spans}
        assert {span.span_id.hex() for span in collector.spans()} == written
        assert len(written) == 10
        assert {path for path, _, _ in collector.requests} == {"/v1/traces", "/v1/metrics"}
        assert {headers["content-type"] for _, headers, _ in collector.requests} == {PROTOBUF}
    (span, *_) = collector.spans()
    assert {item.key for item in span.attributes} >= {names.REFIT_ID}
    assert said(caplog) == []


async def test_a_refits_spans_and_numbers_arrive_without_a_journal(caplog: pytest.LogCaptureFixture) -> None:
    with running() as collector:
        with configure(endpoint=collector.url, level=2, sample=1.0) as telemetry:
            assert telemetry.journal is None
            async with SimFleet([SimulatedBackend()], default_observer()) as fleet:
                await fleet.generate([1], SamplingParams(max_tokens=3))
                assert (await fleet.refit_to(1)).outcome is Outcome.COMMITTED
        got = collector.names()
        assert {got[name] for name in (names.REFIT, names.SUSPEND, names.RECEIVE_WEIGHTS, names.GENERATE)} == {1}
        (point,) = collector.numbers()[names.REFIT_DURATION].histogram.data_points
        assert point.count == 1
    assert said(caplog) == []


LIES = {
    "error": (Reply(500, b"no"), "http_500"),
    "busy": (Reply(503, headers={"Retry-After": "3600"}), "http_503"),
    "elsewhere": (Reply(404, b"<html>", "text/html"), "http_404"),
    "moved": (Reply(302, headers={"Location": "http://127.0.0.1:1/"}), "http_302"),
    "login page": (Reply(200, b"<html>welcome", "text/html"), "unreadable_answer"),
    "bad protobuf": (Reply(200, b"\xff\xff\xff"), "unreadable_answer"),
    "bad json": (Reply(200, b"[1]", "application/json"), "unreadable_answer"),
    "flood": (Reply(200, b"x" * 200_000), "unreadable_answer"),
    "compressed": (Reply(200, b"x", headers={"Content-Encoding": "gzip"}), "unreadable_answer"),
    "no http": (Reply(raw=b"SSH-2.0-OpenSSH_9.2\r\n"), "unreadable_answer"),
    "torn": (Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf"), "unreadable_answer"),
    "hangs up": (Reply(raw=b""), "unreachable"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_lying_collector_did_not_take_is_counted_by_reason_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    reply, reason = LIES[lie]
    with running(lambda path: reply) as collector:
        with configure(tmp_path, endpoint=collector.url):
            work("a")
        assert collector.requests
    assert said(caplog) == [f"telemetry lost 1 metric ({reason}), 5 span ({reason}); collector: {collector.url}"]
    assert len(journal.read(tmp_path).spans) == 5


@pytest.mark.parametrize(
    ("rejected", "lost"), [(2, "2 span (rejected)"), (10**12, "5 span (rejected)"), (0, None), (-3, None)]
)
def test_a_partial_success_loses_what_it_says_and_never_more_than_was_sent(
    caplog: pytest.LogCaptureFixture, rejected: int, lost: str | None
) -> None:
    with running(lambda path: partial(rejected) if path == "/v1/traces" else everything(path)) as collector:
        with configure(endpoint=collector.url):
            work("a")
        assert collector.names() == {names.SEND_WEIGHTS: 5}, "and is not sent again"
    assert said(caplog) == ([] if lost is None else [f"telemetry lost {lost}; collector: {collector.url}"])


@pytest.mark.parametrize("body", [b"", b"{}", b'{"partialSuccess": {}}', b'{"partialSuccess": null}'])
def test_an_answer_in_json_or_none_at_all_will_do(caplog: pytest.LogCaptureFixture, body: bytes) -> None:
    reply = Reply(200, body, "application/json; charset=utf-8")
    with running(lambda path: reply) as collector, configure(endpoint=collector.url):
        work("a")
    assert said(caplog) == []


def test_a_dead_collector_costs_its_own_spans_and_the_log_has_no_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dead() as url:
        began = time.monotonic()
        with configure(tmp_path, endpoint=url.replace("//", "//me:secret@")):
            work("a")
        assert time.monotonic() - began < HANGS
    assert said(caplog) == [f"telemetry lost 1 metric (unreachable), 5 span (unreachable); collector: {url}"]
    assert len(journal.read(tmp_path).spans) == 5


def test_a_slow_collector_does_not_keep_the_journals_or_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with slow() as collector:
        began = time.monotonic()
        with configure(tmp_path, endpoint=collector.url) as telemetry:
            work("a")
            assert not telemetry.flush(0.2)
            assert len(journal.read(tmp_path).spans) == 5
            work("b")
        assert time.monotonic() - began < HANGS
    assert said(caplog) == [f"telemetry lost 1 metric (timeout), 10 span (timeout); collector: {collector.url}"]
    assert len(journal.read(tmp_path).spans) == 10


def test_what_a_collector_did_not_take_at_first_arrives_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    with running(lambda path: Reply(503)) as collector, configure(endpoint=collector.url) as telemetry:
        work("a")
        assert not telemetry.flush(HANGS)
        collector.requests.clear()
        collector.reply = everything
        work("b")
        assert telemetry.flush(HANGS)
        assert collector.names() == {names.SEND_WEIGHTS: 10}
    assert said(caplog) == []


def test_a_collector_that_knows_no_metrics_gets_all_the_spans() -> None:
    with running(lambda path: everything(path) if path == "/v1/traces" else Reply(404)) as collector:
        with configure(endpoint=collector.url) as telemetry:
            for n in range(4):
                work(f"{n}-")
                telemetry.flush(HANGS)
        assert collector.names() == {names.SEND_WEIGHTS: 20}


@pytest.mark.parametrize("kind", ["dead", "slow", "500"])
async def test_refits_under_load_have_the_same_results_whatever_the_collector_does(kind: str) -> None:
    async def results(endpoint: str | None) -> list[object]:
        with configure(endpoint=endpoint, level=2, sample=1.0):
            engines = [SimulatedBackend(delays=Delays(step=0.001)) for _ in range(2)]
            async with SimFleet(engines, default_observer()) as fleet:
                asked = [asyncio.create_task(fleet.generate([n], SamplingParams(max_tokens=50))) for n in range(8)]
                await asyncio.sleep(0.02)
                outcomes = [(await fleet.refit_to(version)).outcome for version in (1, 2)]
                done = await asyncio.gather(*asked)
                return [outcomes, [(len(c.token_ids), c.finish_reason) for c in done]]

    want = await results(None)
    if kind == "dead":
        with dead() as url:
            assert await results(url) == want
    else:
        with slow() if kind == "slow" else running(lambda path: Reply(500)) as collector:
            assert await results(collector.url) == want


def test_the_environment_says_where_and_with_what_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.url}/tenant/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=open%20sesame,x-other=2")
        with configure(endpoint="env"):
            work("a")
        assert {path for path, _, _ in collector.requests} == {"/tenant/v1/traces", "/tenant/v1/metrics"}
        assert {(h["x-key"], h["x-other"]) for _, h, _ in collector.requests} == {("open sesame", "2")}
        assert collector.names() == {names.SEND_WEIGHTS: 5}


def test_each_signal_may_have_an_endpoint_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as traces, running() as metrics:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{traces.url}/t")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{metrics.url}/m")
        with configure(endpoint="env"):
            work("a")
    assert [{path for path, _, _ in c.requests} for c in (traces, metrics)] == [{"/t"}, {"/m"}]


@pytest.mark.parametrize(
    ("endpoint", "variable"),
    [
        ("localhost:4318", None),
        ("grpc://localhost:4317", None),
        ("http://", None),
        ("http://localhost:port", None),
        ("http://localhost:4318/v1/traces", None),
        ("http://localhost:4318/?a=b", None),
        ("env", None),
        ("env", ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost:4318")),
    ],
)
def test_a_wrong_endpoint_is_said_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, variable: tuple[str, str] | None
) -> None:
    if variable:
        monkeypatch.setenv(*variable)
    with pytest.raises(UnsupportedPolicy, match="endpoint"):
        configure(tmp_path / "run", endpoint=endpoint)
    assert not (tmp_path / "run").exists()
    assert isinstance(default_observer(), NullObserver)


def test_another_protocol_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UnsupportedPolicy, match="'grpc'"):
        configure(endpoint="env")


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pitstop.telemetry.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(
        ExporterMissing, match="the extra otlp: pip install opentelemetry-exporter-otlp-proto-http"
    ) as caught:
        configure(tmp_path / "run", endpoint="http://localhost:4318")
    assert (caught.value.slug, isinstance(caught.value, LocalError)) == ("exporter_missing", True)
    assert not (tmp_path / "run").exists()
    with configure(tmp_path / "run"):
        work("a")
    assert len(journal.read(tmp_path / "run").spans) == 5


def worker(case: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.telemetry.exporting", case, *more],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_forked_child_sends_its_own_spans_and_leaves_the_parents_alone() -> None:
    with running() as collector:
        done = worker("forks", collector.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert collector.names() == {names.SEND_WEIGHTS: 15}
        assert len({span.span_id for span in collector.spans()}) == 15


def test_a_forked_child_says_what_it_lost() -> None:
    with dead() as url:
        done = worker("forks", url)
    assert sorted(done.stderr.splitlines()) == [
        f"telemetry lost 1 metric (unreachable), 10 span (unreachable); collector: {url}",
        f"telemetry lost 5 span (unreachable); collector: {url}",
    ]


def test_sigterm_still_kills_when_the_collector_is_slow(tmp_path: Path) -> None:
    with slow() as collector:
        done = worker("killed", collector.url, str(tmp_path))
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == f"telemetry lost 1 metric (timeout), 5 span (timeout); collector: {collector.url}\n"
    assert len(journal.read(tmp_path).spans) == 5


def test_importing_the_package_loads_no_exporter() -> None:
    code = "import sys, pitstop.telemetry; print('requests' in sys.modules, 'pitstop.telemetry.otlp' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
