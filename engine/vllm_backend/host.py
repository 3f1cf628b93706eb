"""The doing side of `config`: looking at this machine, holding ports, placing processes on CPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pitstop.engine.rundir import RunDir, base
from pitstop.engine.vllm_backend.config import SOCKETS, VISIBLE, Binding, Host, bands, cpu_list

_PROC = Path("/proc")
_NODES = Path("/sys/devices/system/node")
_LONGEST: Final = 107 - 37 - 13  # what a unix socket's path may have, less a name of vLLM's, less a run's folder

_runs: Final[dict[int, RunDir]] = {}
_making: Final = threading.Lock()
_starting = 0


def look() -> Host:
    """Look at this machine. Initializes no GPU: a process that had would not be forked."""
    ephemeral = 32768
    with contextlib.suppress(OSError, ValueError):
        ephemeral = int((_PROC / "sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return Host(_devices(), dict(os.environ), ephemeral, os.path.expanduser("~"))


def _devices() -> tuple[str, ...]:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return ()
    if (visible := os.environ.get(VISIBLE)) is not None:
        return tuple(filter(None, (name.strip() for name in visible.split(","))))
    import torch

    return tuple(map(str, range(torch.cuda.device_count())))


class Band:
    """Ports for one replica, held against every other engine that looks for a band, here or in another process."""

    def __init__(self, host: Host) -> None:
        """`first` is None where every band is taken: then vLLM asks the kernel for ports."""
        self.first: int | None = None
        self._guard: socket.socket | None = None
        for first in bands(host):
            guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                guard.bind(("", first))
            except OSError:
                guard.close()
                continue
            self.first, self._guard = first, guard
            return

    def close(self) -> None:
        """Let others have it. Idempotent."""
        if self._guard is not None:
            self._guard.close()


@contextlib.contextmanager
def sockets() -> Iterator[RunDir | None]:
    """Have vLLM make its sockets in a private folder of this process, while an engine starts; None if the caller has
    chosen another.

    The frontend makes some of them, so it is its environment that says so: for all engines that start at that time, and
    not for processes that a caller starts afterwards.
    """
    global _starting
    with _making:
        if (run := _folder()) is not None:
            _starting += 1
            os.environ[SOCKETS] = str(run.path)
    try:
        yield run
    finally:
        with _making:
            if run is not None:
                _starting -= 1
                if not _starting:
                    os.environ.pop(SOCKETS, None)


def _folder() -> RunDir | None:
    chosen = os.environ.get(SOCKETS)
    # A child may have its parent's folder in its environment, which goes with the parent: that is no choice.
    if chosen is not None and not of_a_run(chosen):
        return None
    mine = _runs.get(os.getpid())
    if mine is None or not mine.path.is_dir():  # whoever clears folders for temporary files may have cleared this one
        root = base()
        fits = len(os.fsencode(root)) <= _LONGEST
        mine = _runs[os.getpid()] = RunDir(root if fits else Path("/tmp", root.name))
    return mine


def of_a_run(folder: str) -> bool:
    """Whether a folder is one that `sockets` has made, here or in another process of this user."""
    return Path(folder).parent.name == f"pitstop-{os.getuid()}"


@contextlib.contextmanager
def changed(environment: Mapping[str, str]) -> Iterator[None]:
    """Run with a changed environment, and put it back. One at a time: it is the process's."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def numa_cpus(root: Path = _NODES) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node."""
    return {
        int(folder.name.removeprefix("node")): cpu_list((folder / "cpulist").read_text())
        for folder in root.glob("node[0-9]*")
        if (folder / "cpulist").exists()
    }


def bind(binding: Binding) -> list[int]:
    """Place every thread that a process has; those that it starts later follow. Return whom that reached.

    Memory is placed by who touches it first, so it needs no policy of its own.
    """
    reached = []
    for pid, cpus in binding.cpus.items():
        with contextlib.suppress(OSError):
            for thread in (_PROC / str(pid) / "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cpus)
            reached.append(pid)
    return reached
