"""A program that is killed leaves no process behind, at whatever moment, and the next one starts at once."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pitstop.engine.vllm_backend.processes import descendants
from tests.conftest import Checkpoint

SCRIPT = Path(__file__).with_name("owner.py")


def start(model: Path, scratch: Path) -> subprocess.Popen[str]:
    # Torch compiles into the folder for temporary files unless it is told where to.
    where = {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch.parent / "compiled")}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(model)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **where},
    )  # fmt: skip


def left_in(scratch: Path) -> list[str]:
    return [str(path) for path in scratch.rglob("*") if path != scratch / f"pitstop-{os.getuid()}"]


def wait_up(owner: subprocess.Popen[str]) -> Path:
    assert owner.stdout is not None
    for line in owner.stdout:
        if line.startswith("up "):
            return Path(line.split("ipc://")[1].strip()).parent
    raise AssertionError("the engine did not come up")


def engine_processes(owner: int) -> list[int]:
    """What runs beneath the owner, multiprocessing's own helpers left out: they end when their pipes close."""
    return [pid for pid in descendants(owner) if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def gone(pidfds: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    left = set(pidfds)
    while left and (rest := until - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(rest * 1000):
            poller.unregister(pidfd)
            left.discard(pidfd)
    return not left


@pytest.mark.timeout(240)
@pytest.mark.parametrize("when", ["while the core starts", "while the model loads", "when it is up"])
def test_a_killed_owner_leaves_no_process_and_nothing_that_the_next_one_does_not_clear(
    checkpoint: Checkpoint, when: str, tmp_path: Path
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    owner = start(checkpoint("llama", 0), scratch)
    try:
        folder = None
        if when == "when it is up":
            folder = wait_up(owner)
        else:
            wanted = 1 if when == "while the core starts" else 2
            while len(engine_processes(owner.pid)) < wanted:
                assert owner.poll() is None
                time.sleep(0.05)
        pidfds = [os.pidfd_open(pid) for pid in engine_processes(owner.pid)]
        assert pidfds
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    # A process that is still importing can only look for its parent once it has imported what looks.
    assert gone(pidfds, 10 if when == "when it is up" else 40)
    for pidfd in pidfds:
        os.close(pidfd)
    if folder is not None:
        assert folder.exists()
        second = start(checkpoint("llama", 0), scratch)
        try:
            assert wait_up(second) != folder
            assert not folder.exists()
        finally:
            second.send_signal(signal.SIGINT)
            try:
                second.wait(20)
            finally:
                second.kill()
                assert second.stdout is not None
                second.stdout.close()
        assert left_in(scratch) == []
