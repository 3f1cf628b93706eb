"""Where vLLM makes its sockets."""

from __future__ import annotations

import os
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


def test_a_process_has_one_private_folder_for_the_sockets_of_all_its_engines() -> None:
    run = host.sockets_folder()
    assert run is not None
    assert run is host.sockets_folder()
    assert os.environ[SOCKETS] == str(run.path)
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_a_callers_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKETS, "/somewhere")
    assert host.sockets_folder() is None
    assert os.environ[SOCKETS] == "/somewhere"


@pytest.mark.parametrize("forked", [True, False])
def test_a_child_makes_a_folder_of_its_own_and_not_in_its_parents(
    monkeypatch: pytest.MonkeyPatch, *, forked: bool
) -> None:
    parents = host.sockets_folder()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    if not forked:
        monkeypatch.setattr(host, "_runs", {})
    own = host.sockets_folder()
    assert own is not None
    assert parents is not None
    assert own.path != parents.path
    assert os.environ[SOCKETS] == str(own.path)
    parents.close()


def test_a_sockets_path_fits_into_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / f"pitstop-{os.getuid()}"
    monkeypatch.setattr(host, "base", lambda: deep)
    run = host.sockets_folder()
    assert run is not None
    assert len(f"{run.path}/bd65600d-8669-4903-8a14-af88203add38") <= 107
    assert not deep.exists()


def test_the_folder_goes_with_its_process() -> None:
    script = "from pitstop.engine.vllm_backend.host import sockets_folder; print(sockets_folder().path)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip()
    assert not Path(told.stdout.strip()).exists()
