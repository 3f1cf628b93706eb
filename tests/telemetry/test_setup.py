from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pitstop.engine.errors import LocalError, UnsupportedPolicy
from pitstop.engine.ports import NullObserver, Work, default_observer
from pitstop.telemetry import AlreadyConfigured, configure, journal, names
from pitstop.telemetry.live import Live

ROOT = Path(__file__).resolve().parents[2]


def run(case: str, folder: Path, *more: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.telemetry.workers", case, str(folder), *more],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


def arrived(folder: Path, prefix: str) -> int:
    """Distinct spans of work whose id begins so; a span that was written twice fails here."""
    found = [s for s in journal.read(folder).spans if str(s.attributes[names.REFIT_ID]).startswith(prefix)]
    assert len({span.span_id for span in found}) == len(found)
    return len(found)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(("ending", "code"), [("normal", 0), ("term", -signal.SIGTERM), ("kill", -signal.SIGKILL)])
def test_a_childs_spans_arrive_however_it_was_started_and_ends(
    tmp_path: Path, method: str, ending: str, code: int
) -> None:
    """Field fault B53. The killed child had a second to write."""
    returncode, (exitcode, seconds) = run("parent", tmp_path, method, ending)
    assert (returncode, int(exitcode)) == (0, code)
    assert [arrived(tmp_path, prefix) for prefix in ("parent", "child", "later")] == [5, 5, 5]
    if ending != "normal":
        assert float(seconds) < 2.0
    instances = {span.resource[names.SERVICE_INSTANCE_ID] for span in journal.read(tmp_path).spans}
    assert len(instances) == 2
    spans = [file for file in tmp_path.glob("*.jsonl") if ".metrics." not in file.name]
    assert {str(i) for i in instances} == {file.stem.partition("-")[2] for file in spans}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_may_turn_telemetry_off_and_on_again(tmp_path: Path, method: str) -> None:
    run("parent", tmp_path, method, "cycle")
    assert [arrived(tmp_path, prefix) for prefix in ("parent", "child", "again", "later")] == [5, 5, 5, 5]


def test_a_child_forked_by_hand_writes_its_own_spans_and_leaves_the_parents_alone(tmp_path: Path) -> None:
    assert run("raw_fork", tmp_path)[0] == 0
    assert [arrived(tmp_path, prefix) for prefix in ("parent", "child", "open")] == [5, 5, 1]
    numbers = [file for file in tmp_path.glob("*.metrics.jsonl") if file.stat().st_size]
    assert len(numbers) <= 1, "a child must not report its parent's numbers again"


def test_forks_in_the_middle_of_work_lose_nothing(tmp_path: Path) -> None:
    code, exits = run("storm", tmp_path)
    assert (code, exits) == (0, ["0"] * 30)
    assert arrived(tmp_path, "child") == 150
    assert journal.read(tmp_path).torn == 0


def test_sigterm_kills_as_before_and_what_was_open_is_written_as_cut_short(tmp_path: Path) -> None:
    assert run("killed_main", tmp_path)[0] == -signal.SIGTERM
    assert arrived(tmp_path, "a") == 5
    (span,) = journal.read(tmp_path).named(names.REFIT)
    assert span.attributes[names.TRUNCATED] is True


def test_two_processes_make_one_trace(tmp_path: Path) -> None:
    assert run("trainer", tmp_path)[0] == 0
    found = journal.read(tmp_path)
    (send,), (refit,), (part,) = (found.named(n) for n in (names.SEND_WEIGHTS, names.REFIT, names.REFIT_REPLICA))
    (receive,) = found.named(names.RECEIVE_WEIGHTS)
    assert found.children(send) == [refit]
    assert found.children(refit) == [part]
    assert [span.name for span in found.children(part)] == [
        names.SUSPEND, names.RECEIVE_WEIGHTS, names.FINALIZE, names.RESUME,
    ]  # fmt: skip
    assert [(link.trace_id, link.span_id) for link in receive.links] == [(send.trace_id, send.span_id)]
    assert (send.resource["rl.role"], refit.resource["rl.role"]) == ("trainer", "fleet")
    assert {span.resource["rl.run.id"] for span in found.spans} == {"join"}
    assert (send.kind, receive.kind) == ("producer", "consumer")


def test_once_at_a_time(tmp_path: Path) -> None:
    assert run("twice", tmp_path) == (0, ["already_configured"])
    assert [arrived(tmp_path, prefix) for prefix in ("first", "between", "second")] == [5, 0, 5]
    assert issubclass(AlreadyConfigured, LocalError)


def test_a_provider_of_the_programs_own_stays(tmp_path: Path) -> None:
    assert run("own_provider", tmp_path) == (0, ["True", "5"])
    assert arrived(tmp_path, "a") == 5


def test_vllms_request_is_beneath_ours_and_an_orphan_is_not_recorded(tmp_path: Path) -> None:
    assert run("vllm_like", tmp_path)[0] == 0
    found = journal.read(tmp_path)
    (ours,), (theirs,) = found.named(names.GENERATE), found.named("llm_request")
    assert found.children(ours) == [theirs]


def test_a_journal_that_cannot_be_written_delays_nothing(tmp_path: Path) -> None:
    code, (work, end) = run("stuck", tmp_path)
    assert code == 0
    assert float(work) < 1.0
    assert 1.5 < float(end) < 3.0


@pytest.mark.parametrize(
    ("option", "value"), [("role", "boss"), ("level", 3), ("sample", 1.5), ("endpoint", "localhost")]
)
def test_a_wrong_option_is_said_before_anything_is_done(tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(UnsupportedPolicy, match=option):
        configure(tmp_path / "run", **{option: value})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    assert isinstance(default_observer(), NullObserver)


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        configure(tmp_path / "file" / "run")
    assert isinstance(default_observer(), NullObserver)
    with configure():
        pass


def test_journals_are_private_and_appear_while_the_process_lives(tmp_path: Path) -> None:
    with configure(tmp_path / "run") as telemetry:
        assert signal.getsignal(signal.SIGTERM) == telemetry._terminated
        default_observer().opened(Work("refit", "refit:r", time.time_ns()))
        default_observer().closed("refit:r", time.time_ns())
        limit = time.monotonic() + 2
        while not (tmp_path / "run").exists() or not journal.read(tmp_path / "run").spans:
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert telemetry.flush()
        assert telemetry.run_id == "run"
        numbers = list((tmp_path / "run").glob("*.metrics.jsonl"))
        assert [names.REFIT_DURATION in file.read_text() for file in numbers] == [True]
    modes = {stat.S_IMODE(os.stat(file).st_mode) for file in (tmp_path / "run").iterdir()}
    assert modes == {0o600}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_a_folder_nothing_is_written_and_added_observers_still_see() -> None:
    live = Live()
    with configure() as telemetry:
        telemetry.add(live)
        assert telemetry.journal is None
        headers = {"traceparent": "x"}
        assert default_observer().opened(Work("refit", "refit:r", 1, headers=headers)) is headers
        default_observer().closed("refit:r", 2)
    assert live.refits == {"committed": 1}


def test_importing_the_package_loads_no_sdk() -> None:
    code = "import sys, pitstop.telemetry as t; print(*[m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
