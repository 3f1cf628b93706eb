"""Many tensors copied to their places at once: on a GPU by one launch, however many they are.

Torch's batched copy takes 1.6 times as long as one copy of as many bytes, and 4.8 times for 18 000 tensors, with the
views of them that it needs; this takes 1.1 and 1.35 times (`benchmarks/load_plan.py`, H200, 14.2 GiB). Where tensors
are and where they go is known beforehand, so that is put into a table while the replica serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from pitstop.engine.vllm_backend.loader_trace import View

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


class Pair(NamedTuple):
    """A place, and the part of a tensor that goes there: in bytes, `nbytes` from `offset` on to `address`.

    `nbytes` is 0 where one of the two is not in one piece.
    """

    place: Tensor
    part: View
    address: int
    offset: int
    nbytes: int


def pair(place: Tensor, part: View) -> Pair:
    """Look at a place once, not at each version."""
    plain = place.is_contiguous() and part.dense and prod(part.size) == place.numel()
    return Pair(place, part, place.data_ptr(), part.offset * place.itemsize, place.nbytes if plain else 0)


class Copies:
    """Tensors, and the places of one device that their parts go to. Keeps the tensors until it is dropped."""

    def __init__(self, work: Sequence[tuple[Tensor, Sequence[Pair]]], device: Any) -> None:
        self._kept = work
        self._rest: tuple[list[Tensor], list[Tensor]] = [], []
        self._tabled: tuple[Launch, Tensor, Tensor] | None = None
        found, rows = (prepare(device) if work else None), []
        for tensor, pairs in work:
            start, dtype, where = tensor.data_ptr(), tensor.dtype, tensor.device
            for one in pairs:
                place, part, address, offset, nbytes = one
                # No view of either: to make and to drop thousands of them takes longer than the copies.
                if (
                    nbytes and found is not None and dtype == place.dtype and where == place.device
                    and offset + nbytes <= tensor.nbytes and not (start + offset | address | nbytes) % _GRAIN
                ):  # fmt: skip
                    rows.append((start + offset, address, nbytes))
                else:
                    self._rest[0].append(place)
                    self._rest[1].append(part.of(tensor))
        if found is not None and rows:
            launch, upload = found
            try:
                self._tabled = launch, *upload(*table(*zip(*rows, strict=True)))
            except _out_of_memory():
                self._rest = (
                    [one.place for _, pairs in work for one in pairs],
                    [one.part.of(tensor) for tensor, pairs in work for one in pairs],
                )

    def run(self) -> None:
        """Queue the copies on the current stream."""
        import torch

        if self._rest[0]:
            torch._foreach_copy_(*self._rest, non_blocking=True)
        if self._tabled is not None:
            launch, entries, owners = self._tabled
            launch(entries, owners, len(owners))


def _out_of_memory() -> type[Exception]:
    import torch

    return torch.OutOfMemoryError


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
