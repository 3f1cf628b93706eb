"""The whole demo on the tiny model: real replicas, a real trainer, as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from pitstop.engine.rundir import clear_dead

# Engines are spawned here, not forked: that is what users get.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

TAG = "PITSTOP_DEMO_TEST"
# A shell starts what it puts into the background with interrupts ignored, and so they would be ignored here.
CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from pitstop.engine.demo import run; sys.exit(run(sys.argv[1:]))"
)


class Demo:
    """A demo in a session of its own, whose processes are found by a mark in their environment."""

    def __init__(self, folder: Path, cache: Path, *options: str) -> None:
        self.run_dir, self._tag = folder / "run", uuid4().hex
        # Not under pytest's folder: paths of sockets are short.
        self.scratch = Path(tempfile.mkdtemp(prefix="pd-"))
        environment = {**os.environ, TAG: self._tag, "TMPDIR": str(self.scratch), "XDG_CACHE_HOME": str(cache)}
        environment.pop("XDG_RUNTIME_DIR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, "--model", "tiny", "--run-dir", str(self.run_dir), *options],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def pids(self) -> list[int]:
        """Every process of the demo that lives."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                except OSError:
                    continue
                if f"{TAG}={self._tag}".encode() in environment and not zombie:
                    found.append(int(entry.name))
        return found

    def wait_for_steps(self, count: int) -> None:
        until = time.monotonic() + 200
        file = self.run_dir / "steps.jsonl"
        while not file.exists() or len(file.read_text().splitlines()) < count:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.1)

    def end(self, seconds: float) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out

    def gone(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.pids():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def leftovers(self) -> list[str]:
        return [str(path) for path in self.scratch.rglob("*") if path != self.runs]

    @property
    def runs(self) -> Path:
        """Where the folders of this user's runs are."""
        return self.scratch / f"pitstop-{os.getuid()}"

    def log(self) -> str:
        file = self.run_dir / "engine.log"
        return file.read_text() if file.exists() else "no log"

    def kill(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.kill()


def test_the_reward_rises_while_replicas_are_refitted_after_every_step(
    folder: Path, cache: Path, demos: list[Demo]
) -> None:
    demos.append(demo := Demo(folder, cache, "--steps", "12", "--replicas", "2"))
    status, out = demo.end(300)
    assert status == 0, out + demo.log()
    result = json.loads((demo.run_dir / "result.json").read_text())
    assert result["reward_last"] - result["reward_first"] > 0.15
    assert result["accuracy_after"] > result["accuracy_before"]
    steps = [json.loads(line) for line in (demo.run_dir / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert {step["refit"]["outcome"] for step in steps} == {"committed"}
    assert max(step["stalest"] for step in steps) <= 1
    # What the replicas say about their tokens is what the trainer finds, up to bf16.
    assert steps[0]["drift"] < 0.05
    assert result["streams_across_a_refit"] > 0
    assert result["streams_broken"] == 0
    assert any(step["refit"]["bubble"] is not None for step in steps)
    assert "What came out" in out
    assert demo.gone(10)
    assert demo.leftovers() == []


def test_an_interrupt_leaves_nothing_behind(folder: Path, cache: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(folder, cache, "--steps", "100000", "--replicas", "1"))
    demo.wait_for_steps(2)
    # To the whole group, as a terminal does.
    os.killpg(demo.process.pid, signal.SIGINT)
    status, out = demo.end(30)
    assert status == 130, out + demo.log()
    assert "Interrupted; every process was ended." in out
    assert demo.gone(10)
    assert demo.leftovers() == []
    assert json.loads((demo.run_dir / "result.json").read_text())["steps"] >= 2


def test_an_interrupt_while_engines_start_leaves_nothing_behind(folder: Path, cache: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(folder, cache, "--replicas", "1"))
    until = time.monotonic() + 100
    # This one, multiprocessing's own, the trainer, and the engine core.
    while len(demo.pids()) < 4:
        assert time.monotonic() < until, demo.log()
        time.sleep(0.1)
    os.killpg(demo.process.pid, signal.SIGINT)
    status, out = demo.end(60)
    assert status == 130, out + demo.log()
    assert demo.gone(10)
    assert demo.leftovers() == []


def test_nothing_outlives_a_killed_demo(folder: Path, cache: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(folder, cache, "--steps", "100000", "--replicas", "1"))
    demo.wait_for_steps(1)
    demo.process.kill()
    demo.process.wait()
    assert demo.gone(10), demo.pids()
    assert demo.leftovers()
    clear_dead(demo.runs)
    assert demo.leftovers() == []
