"""Processes, by what the kernel says about them. Linux only; a pid is held by its pidfd, so it is never another's."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterable
from time import monotonic


def hold(pid: int) -> int | None:
    """Return a pidfd, readable once the process has ended; None if there is no such process."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def kill(pidfd: int) -> None:
    """Send SIGKILL. Harmless if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def ended(pidfds: Iterable[int], seconds: float) -> bool:
    """Wait until every process has ended; False if `seconds` were not enough."""
    until = monotonic() + seconds
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(max(0.0, until - monotonic()) * 1000):
            return False
    return True


def how_it_ended(exitcode: int | None) -> str:
    """Say what multiprocessing's exit code means."""
    if exitcode is None:
        return "ended"
    return f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exited with status {exitcode}"


def exitcode(pidfd: int) -> int | None:
    """Return a child's exit code, negative for a signal, without reaping it; None if somebody has."""
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except OSError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 if there is none, or no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name in parentheses may hold spaces and parentheses of its own.
            return int(file.read().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


def lineage(ancestor: int) -> list[int] | None:
    """Return the pids between this process and `ancestor`, nearest first; None if it is not an ancestor."""
    between: list[int] = []
    pid = os.getppid()
    while pid not in (0, ancestor):
        between.append(pid)
        pid = parent_of(pid)
    return between if pid == ancestor else None


def children_of_thread(thread: int) -> list[int]:
    """Return the pids of the living children that one thread of this process started."""
    return _children(f"/proc/self/task/{thread}/children")


def descendants(pid: int) -> list[int]:
    """Return the pids below `pid`, children before grandchildren."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in _children(f"/proc/{pid}/task/{task}/children"):
                found += [child, *descendants(child)]
    return found


_SEGMENT = re.compile(r" (/dev/shm/(?:(?:psm_|vllm_|sem\.mp-)\S+|\S+-cpushm_\d+))$", re.MULTILINE)


def segments(pids: Iterable[int]) -> set[str]:
    """Return the paths of the shared memory of vLLM and multiprocessing that processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            found.update(_SEGMENT.findall(file.read()))
    return found


def unlink_unused(paths: Iterable[str]) -> None:
    """Unlink the shared memory among `paths` that no living process has mapped."""
    left = {path for path in paths if os.path.exists(path)}
    if left:
        for path in left - segments(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _children(path: str) -> list[int]:
    try:
        with open(path, encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
