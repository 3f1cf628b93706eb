"""Where vLLM makes its sockets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pitstop.engine.vllm_backend import host
from pitstop.engine.vllm_backend.config import SOCKETS


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(host, "_runs", {})
    monkeypatch.setattr(host, "base", lambda: tmp_path / f"pitstop-{os.getuid()}")
    # What it sets itself goes when this is undone.
    monkeypatch.setenv(SOCKETS, "")
    monkeypatch.delenv(SOCKETS)
    yield
    for run in host._runs.values():
        run.close()


def test_the_engines_of_a_process_share_a_private_folder_which_its_later_children_do_not_hear_of() -> None:
    with host.sockets() as one:
        with host.sockets() as other:
            assert one is not None
            assert one is other
            assert os.environ[SOCKETS] == str(one.path)
        assert os.environ[SOCKETS] == str(one.path)
    assert SOCKETS not in os.environ
    with host.sockets() as again:
        assert again is one
    assert one.path.stat().st_mode & 0o777 == 0o700


def test_a_callers_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKETS, "/somewhere")
    with host.sockets() as run:
        assert run is None
        assert os.environ[SOCKETS] == "/somewhere"
    assert os.environ[SOCKETS] == "/somewhere"


@pytest.mark.parametrize("forked", [True, False])
def test_a_child_that_starts_meanwhile_makes_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, *, forked: bool
) -> None:
    with host.sockets() as parents:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        if not forked:
            monkeypatch.setattr(host, "_runs", {})
        with host.sockets() as own:
            assert own is not None
            assert parents is not None
            assert own.path != parents.path
            assert os.environ[SOCKETS] == str(own.path)
        monkeypatch.undo()
    parents.close()


def test_a_folder_that_somebody_has_cleared_is_made_anew() -> None:
    with host.sockets() as before:
        assert before is not None
    shutil.rmtree(before.path)
    with host.sockets() as after:
        assert after is not None
        assert after.path.is_dir()


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_sockets_path_fits_into_what_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, letter: str
) -> None:
    deep = tmp_path / (letter * 60) / f"pitstop-{os.getuid()}"
    monkeypatch.setattr(host, "base", lambda: deep)
    with host.sockets() as run:
        assert run is not None
        assert len(os.fsencode(f"{run.path}/bd65600d-8669-4903-8a14-af88203add38")) <= 107
    assert not deep.exists()


def test_the_folder_goes_with_its_process() -> None:
    script = "from pitstop.engine.vllm_backend.host import sockets\nwith sockets() as run: print(run.path)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip()
    assert not Path(told.stdout.strip()).exists()
