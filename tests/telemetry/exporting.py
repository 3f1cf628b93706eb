"""Processes for the tests of export: run as `python -m tests.telemetry.exporting CASE URL ...`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

from pitstop import telemetry
from pitstop.engine.ports import default_observer
from pitstop.telemetry import names
from tests.telemetry.workers import five


def work(prefix: str) -> None:
    """Make five spans and a number."""
    five(prefix)
    default_observer().counted(names.STALENESS, 1, {"at": "admission"})


def forks(url: str) -> None:
    """Fork while the courier has a connection; both sides go on."""
    with telemetry.configure(endpoint=url) as on:
        work("before")
        on.flush(5)
        child = multiprocessing.get_context("fork").Process(target=work, args=("child",))
        child.start()
        work("after")
        child.join(20)


def killed(url: str, run_dir: str) -> None:
    """Die by SIGTERM while the collector does not answer."""
    telemetry.configure(run_dir, endpoint=url)
    work("a")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


if __name__ == "__main__":
    {case.__name__: case for case in (forks, killed)}[sys.argv[1]](*sys.argv[2:])
