"""Shared memory without a name: a sealed memfd, opened by others as `/proc/<pid>/fd/<n>`.

It goes away with the last process that has it open, however that one ends; it is not limited by the size of
/dev/shm; and its seals keep anyone from truncating it under a reader. Pages are first touched by whoever writes
them first, which costs many times a copy: so a segment is kept, and so is each mapping of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Callable
from ctypes import CDLL, c_int, c_long, c_size_t, c_ubyte, c_void_p, get_errno
from math import prod
from mmap import MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal

from pitstop.engine.errors import LocalError, PeerLost, WorkerFailed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PATH: Final = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")
_FAILED: Final = c_void_p(-1).value

_libc = CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_libc.munmap.argtypes = [c_void_p, c_size_t]

_open: weakref.WeakSet[Segment] = weakref.WeakSet()
_mapped: dict[int, Callable[[], object]] = {}
_keeping: weakref.WeakSet[Kept] = weakref.WeakSet()


class Segment:
    """The owner's end. Takes no memory until somebody writes to it."""

    def __init__(self, nbytes: int, name: str = "pitstop") -> None:
        self.nbytes = max(nbytes, 1)
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self._fd)
            raise
        self.path: Final = f"/proc/{os.getpid()}/fd/{self._fd}"
        _open.add(self)

    def write(self, content: bytes) -> None:
        """Write `content` at the beginning."""
        os.pwrite(self._fd, content, 0)

    def close(self) -> None:
        """Let go of the memory; mappings of others stay whole. Idempotent."""
        _open.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _forget() -> None:
    # A forked child would keep memory alive that its parent has long let go of. It must not look into it anyway.
    for segment in list(_open):
        with contextlib.suppress(OSError):
            segment.close()
    for unmap in list(_mapped.values()):
        unmap()


os.register_at_fork(after_in_child=_forget)


class Mapping:
    """Somebody's view of a segment.

    It is unmapped when nothing refers to it any more, never sooner: `bytes`, and every tensor made from it, keep it
    alive, since memory that is unmapped under a view is a crash and not an error. (Not the `mmap` module's: that
    keeps a descriptor of its own, which a forked child would hold on to.)
    """

    def __init__(self, path: str, nbytes: int, mode: Literal["write", "read"]) -> None:
        import numpy as np

        fd = _opened(path, os.O_RDWR if mode == "write" else os.O_RDONLY)
        try:
            self.path: Final = path
            self.key = _key(os.fstat(fd))
            if os.fstat(fd).st_size < nbytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise WorkerFailed(f"{path} is not a sealed segment of {nbytes} bytes", operation="attach")
            # A private mapping lets readers have tensors without a way to change what others read.
            sharing = MAP_SHARED if mode == "write" else MAP_PRIVATE
            address = _libc.mmap(None, nbytes, PROT_READ | PROT_WRITE, sharing, fd, 0)
        finally:
            os.close(fd)
        if address == _FAILED:
            raise WorkerFailed(f"{path} cannot be mapped: {os.strerror(get_errno())}", operation="attach")
        block = (c_ubyte * nbytes).from_address(address)
        unmap = weakref.finalize(block, _unmap, address, nbytes)
        unmap.atexit = False
        _mapped[address] = unmap
        self.nbytes = nbytes
        self.address = int(address)
        self.bytes: NDArray[np.uint8] = np.frombuffer(memoryview(block), np.uint8)
        self._flat: dict[str, Tensor] = {}

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
        """Return a view of a part of the segment; it keeps the mapping alive. `offset` must suit the dtype."""
        flat = self._flat.get(dtype)
        if flat is None:
            import torch

            element: torch.dtype = getattr(torch, dtype)
            whole = torch.from_numpy(self.bytes[: self.nbytes // element.itemsize * element.itemsize])
            self._flat[dtype] = flat = whole.view(element)
        return flat.narrow(0, offset // flat.itemsize, prod(shape)).view(shape)


def _unmap(address: int, nbytes: int) -> None:
    _mapped.pop(address, None)
    _libc.munmap(address, nbytes)


class Kept:
    """Mappings that outlive a refit, one an engine. A new segment of the same engine takes the place of the old.

    They go when their engine closes (`forget`), or at the next `take` after it let go of the segment or died.
    """

    def __init__(self, mode: Literal["write", "read"]) -> None:
        self._mode: Final = mode
        self._mappings: dict[str, Mapping] = {}
        self._lock = Lock()
        _keeping.add(self)

    def take(self, engine: str, path: str, nbytes: int, *, fresh: bool = False) -> Mapping:
        """Return a mapping of the segment at `path`, the one of the last refit if that was the same segment.

        Raises:
            PeerLost: the engine is gone.
            WorkerFailed: the segment cannot be mapped.
        """
        with self._lock:
            known = self._mappings.pop(engine, None)
            if known is not None and not fresh and known.nbytes >= nbytes and known.path == path and _there(known):
                self._mappings[engine] = known
                return known
            # The old ones have to be gone before the new one is there, or both take memory.
            known = None
            self._mappings = {name: mapping for name, mapping in self._mappings.items() if _there(mapping)}
            self._mappings[engine] = mapping = Mapping(path, nbytes, self._mode)
            return mapping

    def drop(self, engine: str) -> None:
        """Forget an engine's mapping; views of it keep it until they go."""
        with self._lock:
            mapping = self._mappings.pop(engine, None)
        del mapping  # unmapped here, not under the lock


def forget(engine: str) -> None:
    """Have every `Kept` of this process forget an engine, which has closed."""
    for kept in list(_keeping):
        kept.drop(engine)


def _there(mapping: Mapping) -> bool:
    """Whether its segment is still where it was."""
    with contextlib.suppress(OSError):
        return mapping.key == _key(os.stat(mapping.path))
    return False


class Probe:
    """A little segment that proves to a peer that it shares memory with its maker."""

    def __init__(self) -> None:
        self.nonce: Final = secrets.token_bytes(32)
        self._segment = Segment(len(self.nonce), "pitstop-probe")
        self._segment.write(self.nonce)
        self.path: Final = self._segment.path

    def close(self) -> None:
        """Let go of it."""
        self._segment.close()


def why_not(path: str, nonce: bytes) -> str | None:
    """Return why memory cannot be shared with the maker of a probe; None if it can."""
    try:
        fd = _opened(path, os.O_RDWR)
    except (LocalError, PeerLost, WorkerFailed) as error:
        return error.message
    try:
        found = os.pread(fd, len(nonce) + 1, 0)
    finally:
        os.close(fd)
    return None if found == nonce else f"{path} is something else here: the engine runs in another process space"


def _opened(path: str, flags: int) -> int:
    # The path comes from a peer: nothing else of this machine may be opened in its name.
    if not _PATH.fullmatch(path):
        raise LocalError(f"{path!r} is not a segment")
    try:
        if not os.readlink(path).startswith("/memfd:pitstop"):
            raise LocalError(f"{path} is not a segment")
        return os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        raise PeerLost(f"{path} is gone: its engine died or let go of it", peer="engine") from None
    except OSError as error:
        raise WorkerFailed(f"{path} cannot be opened: {error.strerror}", operation="attach") from None


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
