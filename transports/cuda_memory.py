"""Memory of a GPU that two processes share: one allocates and lends it, the other maps it. And what it copies to.

Our own binding to the CUDA runtime that torch has loaded, since torch cannot do this: its blocks lie somewhere
inside segments of its allocator, and those of expandable segments have no such handle at all. Nothing here may run
in a forked child, whose CUDA is broken: there rings are forgotten, and nothing is called.
"""

from __future__ import annotations

import ctypes.util
import logging
import os
import weakref
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import LocalError, PeerLost, WorkerFailed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HANDLE_NBYTES: Final = 64
_ENABLE_PEER_ACCESS: Final = 1
_PORTABLE: Final = 1
_NO_MEMORY: Final = 2
_GONE: Final = {1: "invalid value", 205: "mapping failed", 400: "invalid handle"}
_LOG: Final = logging.getLogger(__name__)


class _Handle(Structure):
    _fields_ = [("bytes", c_ubyte * HANDLE_NBYTES)]


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cudaGetLastError": (),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cudaFreeHost": (c_void_p,),
    "cudaIpcGetMemHandle": (POINTER(_Handle), c_void_p),
    "cudaIpcOpenMemHandle": (POINTER(c_void_p), _Handle, c_uint),
    "cudaIpcCloseMemHandle": (c_void_p,),
}


class LentRing:
    """The trainer's end: memory of its own. It goes with `close`, or when nothing refers to it any more.

    What others have mapped stays whole for them until they let go of it.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        import torch

        self.device: Final = device
        self.nbytes: Final = nbytes
        pointer, handle = c_void_p(), _Handle()
        with torch.cuda.device(device):
            code = _runtime().cudaMalloc(byref(pointer), nbytes)
            if code == _NO_MEMORY:
                raise _failed(code, "cudaMalloc", f"{nbytes >> 20} MiB for the ring: use fewer or smaller slots")
            _check(code, "cudaMalloc", f"{nbytes >> 20} MiB for the ring")
            self.address: Final = int(pointer.value or 0)
            self._end = _ending(self, device, self.address, "cudaFree")
            try:
                _check(_runtime().cudaIpcGetMemHandle(byref(handle), pointer), "cudaIpcGetMemHandle", _NO_SHARING)
            except WorkerFailed:
                self.close()
                raise
        self.handle: Final = bytes(handle.bytes)

    def close(self) -> None:
        """Give the memory back. Nothing that uses it may be queued any more. Idempotent."""
        self._end()


class BorrowedRing:
    """The receiver's end: a mapping of what a trainer lends, until `close` or until nothing refers to it any more."""

    def __init__(self, device: torch.device, handle: bytes, nbytes: int) -> None:
        if len(handle) != HANDLE_NBYTES:
            raise LocalError(f"a handle of a GPU's memory has {HANDLE_NBYTES} bytes, not {len(handle)}")
        import torch

        self.device: Final = device
        self.handle: Final = handle
        self.nbytes: Final = nbytes
        pointer = c_void_p()
        with torch.cuda.device(device):
            opened = _Handle((c_ubyte * HANDLE_NBYTES).from_buffer_copy(handle))
            code = _runtime().cudaIpcOpenMemHandle(byref(pointer), opened, _ENABLE_PEER_ACCESS)
            if code in _GONE:
                _runtime().cudaGetLastError()
                raise PeerLost(
                    f"the trainer's ring on {device} cannot be mapped ({_said(code)}): it died or let go of it, or is "
                    f"this very process",
                    peer="trainer",
                )
            _check(code, "cudaIpcOpenMemHandle", _NO_SHARING)
        self.address: Final = int(pointer.value or 0)
        self._end = _ending(self, device, self.address, "cudaIpcCloseMemHandle")

    @property
    def closed(self) -> bool:
        """Whether it is no longer mapped."""
        return not self._end.alive

    def close(self) -> None:
        """Unmap it. Nothing that uses it may be queued any more. Idempotent."""
        self._end()


class _Locked:
    """Page-locked host memory. It goes when nothing refers to it any more."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        import torch

        pointer = c_void_p()
        with torch.cuda.device(device):
            code = _runtime().cudaHostAlloc(byref(pointer), nbytes, _PORTABLE)
            _check(code, "cudaHostAlloc", f"no {nbytes >> 20} MiB of page-locked memory")
        self.address: Final = int(pointer.value or 0)
        _ending(self, device, self.address, "cudaFreeHost")


def locked(device: torch.device, nbytes: int) -> Tensor:
    """Return bytes of host memory that a GPU's copy engine reads and writes by itself, and torch knows as pinned.

    Not torch's: its allocator rounds up to a power of two, which is up to twice a model, and keeps it for good.

    Raises:
        WorkerFailed: there is none.
    """
    import torch

    owner = _Locked(device, nbytes)
    return over(owner.address, nbytes, torch.device("cpu"), owner)


def lend(known: LentRing | None, identity: str, nbytes: int) -> LentRing:
    """Return a ring of `nbytes` on the GPU of that identity: `known` again if it is one.

    Raises:
        LocalError: no such GPU is visible here.
        WorkerFailed: there is no memory for it.
    """
    device = device_of(identity)
    if known is not None and (known.device, known.nbytes) == (device, nbytes):
        return known
    return LentRing(device, nbytes)


_NO_SHARING: Final = "both processes must belong to one user and share their PID and IPC namespaces"
_rings: Final[dict[tuple[str, int], weakref.finalize[..., Any]]] = {}
_borrowed: Final[dict[str, BorrowedRing]] = {}
_borrowing = Lock()


def borrow(engine: str, device: torch.device, handle: bytes, nbytes: int, *, fresh: bool = False) -> BorrowedRing:
    """Return a mapping of a trainer's ring, the one of the engine's last refit if that was the same ring.

    Another one takes its place, and goes when nothing refers to it any more. `fresh` maps it anew in any case.

    Raises:
        PeerLost: the trainer is gone.
        WorkerFailed: the memory cannot be mapped.
    """
    with _borrowing:
        known = _borrowed.pop(engine, None)
        if (
            known is None or fresh or known.closed
            or (known.handle, known.device) != (handle, device) or known.nbytes < nbytes
        ):  # fmt: skip
            # The old one first: as long as it is mapped, memory that the trainer has freed is not free.
            known = None
            known = BorrowedRing(device, handle, nbytes)
        _borrowed[engine] = known
        return known


def forget(engine: str) -> None:
    """Let go of an engine's ring, once nothing refers to it."""
    with _borrowing:
        ring = _borrowed.pop(engine, None)
    del ring  # unmapped here, not under the lock


def device_id(device: torch.device) -> str:
    """Return what other processes know this GPU by."""
    import torch

    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def device_of(identity: str) -> torch.device:
    """Return the GPU of that identity as this process knows it.

    Raises:
        LocalError: no such GPU is visible here.
    """
    import torch

    known = [device_id(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if identity not in known:
        raise LocalError(f"{identity} is not among the GPUs that this process sees: {', '.join(known) or 'none'}")
    return torch.device("cuda", known.index(identity))


def over(address: int, nbytes: int, device: torch.device, owner: object) -> Tensor:
    """Return the bytes at an address as a tensor, which keeps `owner` alive."""
    import torch

    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        block = (c_ubyte * nbytes).from_address(address)
        block.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(block, dtype=torch.uint8)
    return torch.as_tensor(_Span(address, nbytes, owner), device=device)


class _Span:
    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (nbytes,), "strides": None, "data": (address, False),
        }  # fmt: skip


def _ending(ring: object, device: torch.device, address: int, call: str) -> weakref.finalize[..., Any]:
    end = weakref.finalize(ring, _let_go, device, address, call)
    # When a process ends the driver does it, and a mapping outlives what is queued.
    end.atexit = False
    _rings[call, address] = end
    return end


def _let_go(device: torch.device, address: int, call: str) -> None:
    _rings.pop((call, address), None)
    import torch

    try:
        # Not by cudaSetDevice and back: that would open a context on the GPU which this thread was on.
        with torch.cuda.device(device):
            _check(getattr(_runtime(), call)(c_void_p(address)), call, "it stays allocated until this process ends")
    except WorkerFailed as error:
        _LOG.warning(error.message)


def _in_child() -> None:
    for end in list(_rings.values()):
        end.detach()
    _rings.clear()
    _borrowed.clear()
    globals()["_borrowing"] = Lock()


os.register_at_fork(after_in_child=_in_child)


def _check(code: int, call: str, about: str) -> None:
    if code:
        raise _failed(code, call, about)


def _failed(code: int, call: str, about: str) -> WorkerFailed:
    # Or torch would find it at its next launch, and take it for that one's.
    _runtime().cudaGetLastError()
    return WorkerFailed(f"{call} failed ({_said(code)}): {about}", operation=call, kind=f"cuda error {code}")


def _said(code: int) -> str:
    return f"{(_runtime().cudaGetErrorString(code) or b'').decode(errors='replace')}, {code}"


@cache
def _runtime() -> CDLL:
    path = _found()
    if path is None:
        raise WorkerFailed("no CUDA runtime is loaded or installed: is this torch built for CUDA?", operation="cuda")
    library = CDLL(path)
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = signature, c_int
    library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (c_int,), c_char_p
    return library


def _found() -> str | None:
    """Return the path of the CUDA runtime, that of torch if there are several."""
    import torch

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith("libcudart.so"):
            return path
    wheels = Path(torch.__file__).parents[1] / "nvidia"
    return next(map(str, sorted(wheels.glob("*/lib/libcudart.so*"))), None) or ctypes.util.find_library("cudart")
