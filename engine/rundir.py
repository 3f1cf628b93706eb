"""The private folder of one running engine: its sockets and keys, and what has to be cleared if it is killed.

A run holds an flock on its folder for as long as any process of it lives. So a folder whose lock can be had belongs
to a run whose whole tree is gone, and the next start clears it, together with the shared memory that it had noted:
other runs, alive, are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pitstop.engine.errors import LocalError

_SHM: Final = Path("/dev/shm")
_SHM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_LONGEST: Final = 60
_LOCK, _NOTED, _LEFT = "lock", "shm", "left-"
_FILE: Final = re.compile(r"vllm_dist_[0-9a-f]{32}")


def base() -> Path:
    """Where this user's runs are: under `XDG_RUNTIME_DIR`, else under the folder for temporary files."""
    root = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    # A unix socket's path holds 107 bytes, and clusters have long folders for temporary files.
    return Path(root if len(os.fsencode(root)) <= _LONGEST else "/tmp") / f"pitstop-{os.getuid()}"


class RunDir:
    """A folder of mode 0700, locked until `close`."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or base()
        _private(root)
        clear_dead(root)
        self.path, self._lock = _claimed(root)
        self._noting = threading.Lock()
        # An engine that is described and never entered goes without being closed.
        self._finalizer = weakref.finalize(self, _removed, self.path, self._lock, os.getpid())

    def note_shared_memory(self, pids: Iterable[int]) -> None:
        """Write down which named segments these processes, and those beneath them, have mapped.

        vLLM's worker queues are such segments, and a SIGKILL would leave them behind.
        """
        found = {name for pid in pids for member in _tree(pid) for name in _mapped(member)}
        with self._noting, contextlib.suppress(FileNotFoundError):  # the run may be over by now
            noted = set(_lines(self.path / _NOTED))
            if found - noted:
                (self.path / _NOTED).write_text("\n".join(sorted(found | noted)))

    def sweep(self) -> None:
        """Remove the sockets in the folder that nobody has any more, and the files that processes now gone have left.

        vLLM gives each process sockets, and removes none: a run of many lives would collect them.
        """
        with contextlib.suppress(OSError):  # the folder may be gone, and who sweeps has more to do than this
            # In this order: what is bound after the look is not in the list.
            sockets = [path for path in self.path.iterdir() if path.is_socket()]
            bound = _bound()
            for path in sockets:
                if os.fsencode(path) not in bound:
                    path.unlink(missing_ok=True)
            for note in self.path.glob(f"{_LEFT}*"):
                if not _lives(note.name.removeprefix(_LEFT)):
                    _take_away(note)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._finalizer()


def note_file(folder: Path, path: str) -> None:
    """Write down, in a run's folder, a file outside it that nobody will remove when this process has ended."""
    (folder / f"{_LEFT}{os.getpid()}").write_text(path)


def _bound() -> set[bytes]:
    """Return the names of all sockets that anybody here has bound: of any bytes, if they are not in a folder."""
    rows = (line.split(None, 7) for line in Path("/proc/net/unix").read_bytes().splitlines())
    return {row[7] for row in rows if len(row) == 8}


def _lives(pid: str) -> bool:
    with contextlib.suppress(OSError):
        # One that nobody has reaped yet has ended all the same.
        return Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False


def _take_away(note: Path) -> None:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = note.read_text().splitlines()
    for line in lines:
        # Only what vLLM makes, and only if it is ours.
        with contextlib.suppress(OSError):
            status = os.lstat(line)
            if _FILE.fullmatch(Path(line).name) and stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                os.unlink(line)
    note.unlink(missing_ok=True)


def _claimed(root: Path) -> tuple[Path, int]:
    # Under a name that no other start looks at until the lock is held: what is not locked looks dead.
    hidden = root / f".{secrets.token_hex(6)}"
    hidden.mkdir(mode=0o700)
    # Children that are forked share the lock, and a dead parent with living children is not a dead run.
    lock = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return hidden.rename(root / hidden.name[1:]), lock


def _removed(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a process that was forked ends: the run goes on
    for note in path.glob(f"{_LEFT}*"):
        _take_away(note)
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def clear_dead(root: Path) -> list[str]:
    """Remove the folders of runs that are gone, and the shared memory that they noted; return their names."""
    cleared = []
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.name.startswith("."):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in _lines(folder / _NOTED):
                    _unlink(name)
                for note in folder.glob(f"{_LEFT}*"):
                    _take_away(note)
                shutil.rmtree(folder)
                cleared.append(folder.name)
            finally:
                os.close(lock)
    return cleared


def _private(root: Path) -> None:
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LocalError(f"{root} is not a private folder of this user: remove it, or set XDG_RUNTIME_DIR")


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, _lines(children))
    return found


def _mapped(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" /dev/shm/")}
        return {name for path in paths if _SHM_NAME.fullmatch(name := path.removeprefix(f"{_SHM}/"))}
    return set()


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []


def _unlink(name: str) -> None:
    # Only what is ours, and nothing that a name could climb out to.
    if _SHM_NAME.fullmatch(name):
        with contextlib.suppress(OSError):
            if (_SHM / name).lstat().st_uid == os.getuid():
                (_SHM / name).unlink()
