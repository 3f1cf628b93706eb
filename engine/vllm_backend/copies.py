"""Many tensors copied to their places at once: on a GPU by one launch, however many they are.

Torch's batched copy takes 1.6 times as long as one copy of as many bytes, and more the more tensors there are
(`benchmarks/load_plan.py`, H200). Where they are and where they go is known beforehand, so that is put into a table
while the replica serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Launch = Callable[[Tensor, Tensor, int], None]
    Upload = Callable[[NDArray[np.int64], NDArray[np.int32]], tuple[Tensor, Tensor]]

WORD: Final = 8  #: bytes that the kernel counts in
CHUNK: Final = 8192  #: words of one program, at most
_GRAIN: Final = 16  #: addresses and sizes that the kernel takes are multiples of it

_log = logging.getLogger(__name__)
_preparing: Final = Lock()
_prepared: Final[dict[torch.device, tuple[Launch, Upload] | None]] = {}


def table(
    sources: Sequence[int], targets: Sequence[int], nbytes: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Cut memory to be copied into chunks of about equal size, one a program. Addresses and sizes in bytes.

    Returns an entry for each copy: where from, where to, words, and its first chunk; and of each chunk its entry.
    """
    words = np.array(nbytes, np.int64) // WORD
    chunks = -(-words // CHUNK)
    entries = np.stack([np.array(sources, np.int64), np.array(targets, np.int64), words, np.cumsum(chunks) - chunks], 1)
    return entries, np.repeat(np.arange(words.size, dtype=np.int32), chunks)


class Copies:
    """Tensors and the places of the same shapes that they go to, on one device."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], device: Any) -> None:
        self._rest: tuple[list[Tensor], list[Tensor]] = [], []
        self._kept: list[Tensor] = []  # a table keeps nothing alive
        self._tabled: tuple[Launch, Tensor, Tensor] | None = None
        found = prepare(device) if targets else None
        if found is None:
            self._rest = list(targets), list(sources)
        else:
            self._put_down(targets, sources, *found)

    def _put_down(self, targets: Sequence[Tensor], sources: Sequence[Tensor], launch: Launch, upload: Upload) -> None:
        rows = []
        for target, source in zip(targets, sources, strict=True):
            here, there, nbytes = source.data_ptr(), target.data_ptr(), source.nbytes
            plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
            alike = source.device == target.device and target.nbytes == nbytes
            if plain and alike and nbytes and not (here | there | nbytes) % _GRAIN:
                rows.append((here, there, nbytes))
                self._kept += (target, source)
            else:
                self._rest[0].append(target)
                self._rest[1].append(source)
        if rows:
            self._tabled = (launch, *upload(*table(*zip(*rows, strict=True))))

    def run(self) -> None:
        """Queue the copies on the current stream. Sources and targets are kept until this is dropped, no longer."""
        import torch

        if self._rest[0]:
            torch._foreach_copy_(*self._rest, non_blocking=True)
        if self._tabled is not None:
            launch, entries, owners = self._tabled
            launch(entries, owners, len(owners))


def prepare(device: Any) -> tuple[Launch, Upload] | None:
    """Have the kernel of a device compiled and tried out; return it, and what brings its tables there. Idempotent.

    That takes a second where it is not in Triton's cache yet. None without a GPU, and without a Triton that works:
    torch does the copies then.
    """
    if device.type != "cuda":
        return None
    import torch

    with _preparing:
        if device not in _prepared:
            try:
                from pitstop.engine.vllm_backend.copies_triton import launch

                with torch.cuda.device(device):
                    upload = _upload(device)
                    _try_out(launch, upload, device)
                    _prepared[device] = launch, upload
            except Exception as error:  # noqa: BLE001 - a compiler may fail in any way
                why = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                _log.warning("Triton's kernel cannot be used (%s): weights on %s are copied by torch", why, device)
                _prepared[device] = None
        return _prepared[device]


def _upload(device: Any) -> Upload:
    import torch

    # The model's own may be busy for as long as a step takes.
    stream = torch.cuda.Stream()

    def upload(entries: NDArray[np.int64], owners: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(stream):
            there = torch.from_numpy(entries).to(device), torch.from_numpy(owners).to(device)
        stream.synchronize()
        return there

    return upload


def _try_out(launch: Launch, upload: Upload, device: Any) -> None:
    """Copy parts of all kinds of sizes, and compare.

    Raises:
        ArithmeticError: something is not as it should be.
    """
    import torch

    size = 4 * CHUNK * WORD
    source = torch.frombuffer(bytearray(np.random.default_rng(0).bytes(size)), dtype=torch.uint8).to(device)
    target = torch.zeros_like(source)
    at, wanted = 0, target.clone()
    rows = []
    for nbytes in (16, CHUNK * WORD, 48, CHUNK * WORD + 4096, CHUNK * WORD - 16):
        rows.append((source.data_ptr() + at, target.data_ptr() + at, nbytes))
        wanted[at : at + nbytes] = source[at : at + nbytes]
        at += nbytes + 32
    entries, owners = upload(*table(*zip(*rows, strict=True)))
    launch(entries, owners, len(owners))
    if not torch.equal(target, wanted):
        raise ArithmeticError("a copy is wrong")
