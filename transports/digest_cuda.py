"""Copies and digests of tensors' parts on a GPU, one launch a bucket, however many parts that has.

Queued on torch's current stream and nothing else: whoever calls keeps order, and keeps the memory alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch

from pitstop.transports.cuda_memory import over
from pitstop.transports.digest import lanes, reference
from pitstop.transports.digest_table import CHUNK, ROW, SOURCE, TARGET, Parts, table
from pitstop.transports.digest_torch import add_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Launch = Callable[["Tensor", "Tensor", int, int, "Tensor", "Tensor", int, int], None]

_LOG: Final = logging.getLogger(__name__)
_preparing: Final = Lock()
_prepared: Final[dict[torch.device, tuple[Launch | None, Tensor]]] = {}


class CudaWork:
    """Digests of `rows` tensors, added up bucket by bucket.

    One side of the parts is `late`: the address of its row is added when a bucket is run, and may become known as
    late as that. `addresses` has those already known, and 0 for memory that torch has yet to allocate.

    Raises:
        WorkerFailed: the GPU cannot be used.
    """

    def __init__(
        self, device: torch.device, rows: int, parts: Parts, late: Literal["source", "target"],
        addresses: NDArray[np.int64] | None = None, chunk: int = CHUNK,
    ) -> None:  # fmt: skip
        self._launch, self._lanes = prepare(device)
        self._parts = parts
        self._late = SOURCE if late == "source" else TARGET
        self._device = device
        self._sums = torch.zeros(rows, dtype=torch.int64, device=device)
        known = np.zeros(rows, np.int64) if addresses is None else addresses
        # A part without a target is digested where it is.
        copies = np.full(parts.row.size, True) if late == "target" else parts.target != 0
        cut = table(parts, copies, known[parts.row], chunk)
        self._cut, self._chunk = cut, chunk
        self._relative = cut.entries[:, self._late].copy()
        # Kept as long as this is: the GPU reads them whenever it comes to that.
        self._host = _pinned(cut.entries, device)
        self._owners = _pinned(cut.owners, device).to(device, non_blocking=True)
        self._table = torch.empty_like(self._host, device=device) if device.type == "cuda" else self._host

    def run(self, bucket: int, addresses: NDArray[np.int64]) -> None:
        """Queue one bucket's copies and digests; `addresses` are those of the rows that it has parts of."""
        for _ in self.pieces(bucket, addresses):
            pass

    def pieces(self, bucket: int, addresses: NDArray[np.int64], nbytes: int = 1 << 62) -> Iterator[int]:
        """Queue one bucket in pieces of about `nbytes` at most; yield before each how many bytes it has.

        Torch does a bucket at once.
        """
        parts, launches = self._parts, self._cut.launches.get(bucket, [])
        low, high = np.searchsorted(parts.bucket, [bucket, bucket + 1]).tolist()
        total = int((parts.count[low:high] * parts.itemsize[low:high]).sum())
        if self._launch is None:
            yield total
            self._by_torch(bucket, addresses)
        elif launches:
            low, high = self._cut.entries_of[bucket]
            rows = self._cut.entries[low:high, ROW]
            np.add(self._relative[low:high], addresses[rows], out=self._host.numpy()[low:high, self._late])
            if self._table is not self._host:
                self._table[low:high].copy_(self._host[low:high], non_blocking=True)
            # Chunks differ in size; their mean will do.
            chunks = sum(behind - first for first, behind, _ in launches)
            most = max(1, nbytes * chunks // max(total, 1))
            for begin, behind, kind in launches:
                for first in range(begin, behind, most):
                    last = min(first + most, behind)
                    yield total * (last - first) // chunks
                    self._launch(self._table, self._owners, first, last, self._lanes, self._sums, kind, self._chunk)

    def digests(self) -> NDArray[np.uint64]:
        """Return the digests of what has been run, when the current stream has come to its end."""
        return self._sums.cpu().numpy().view(np.uint64).copy()

    def _by_torch(self, bucket: int, addresses: NDArray[np.int64]) -> None:
        parts = self._parts
        low, high = np.searchsorted(parts.bucket, [bucket, bucket + 1]).tolist()
        for p in range(low, high):
            row, width, count = int(parts.row[p]), int(parts.itemsize[p]), int(parts.count[p])
            if not count:
                continue
            address = int(addresses[row])
            source, target = int(parts.source[p]), int(parts.target[p])
            if self._late == SOURCE:
                source += address
            else:
                target += address
            content = over(source, count * (4 if parts.narrow[p] else width), self._device, None)
            if parts.narrow[p]:
                content = content.view(torch.float32).to(torch.bfloat16).view(torch.uint8)
            if target:
                over(target, count * width, self._device, None).copy_(content)
            add_digest(content, width, int(parts.start[p]), self._sums[row], self._lanes)


def _pinned(content: NDArray[Any], device: torch.device) -> Tensor:
    held = torch.empty(content.shape, dtype=getattr(torch, content.dtype.name), pin_memory=device.type == "cuda")
    held.numpy()[...] = content
    return held


def prepare(device: torch.device) -> tuple[Launch | None, Tensor]:
    """Have the kernels of a device compiled and tried out, and return them with their keys. Idempotent.

    That takes seconds where nothing is in Triton's cache yet. Worth calling, in a thread, when a process starts.
    Without Triton or a compiler that works, and if what it makes is wrong, torch does the work.
    """
    with _preparing:
        if device not in _prepared:
            keys = torch.from_numpy(lanes().view(np.int64).copy()).to(device)
            _prepared[device] = _triton(device, keys), keys
        return _prepared[device]


def _triton(device: torch.device, keys: Tensor) -> Launch | None:
    if device.type != "cuda":
        return None
    try:
        from pitstop.transports.digest_triton import launch

        with torch.cuda.device(device):
            _try_out(launch, device, keys)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way
        why = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        _LOG.warning("Triton's kernels cannot be used (%s): digests of weights on %s take long", why, device)
        return None
    return launch


def _try_out(launch: Launch, device: torch.device, keys: Tensor) -> None:
    """Compile the kernel of each kind, and compare its result with the definition's.

    Raises:
        ArithmeticError: it is another.
    """
    content = np.random.default_rng(0).bytes(80_000)
    source = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    # Of bytes, of halves of words that lie well or badly, and of floats: which all come to lie one behind the other.
    cases = [(width, skip, narrow) for width, narrow in ((1, 0), (2, 0), (2, 1)) for skip in (0, 4)]
    count = [(len(content) - skip) // (4 if narrow else width) for width, skip, narrow in cases]
    offset = [n * 2 * len(content) + skip for n, (_, skip, _) in enumerate(cases)]
    target = torch.zeros(2 * len(content) * len(cases), dtype=torch.uint8, device=device)
    zeros = np.zeros(len(cases), np.int64)
    parts = Parts(
        zeros, np.arange(len(cases)), np.array([width for width, _, _ in cases]), zeros, np.array(count),
        source.data_ptr() + np.array([skip for _, skip, _ in cases]), target.data_ptr() + np.array(offset),
        np.array([bool(narrow) for _, _, narrow in cases]),
    )  # fmt: skip
    sums = torch.zeros(len(cases), dtype=torch.int64, device=device)
    cut = table(parts, np.full(len(cases), True), zeros)
    entries, owners = torch.from_numpy(cut.entries).to(device), torch.from_numpy(cut.owners).to(device)
    for low, high, kind in cut.launches[0]:
        launch(entries, owners, low, high, keys, sums, kind, CHUNK)
    found = sums.cpu().numpy().view(np.uint64).tolist()
    written = target.cpu()
    for (width, skip, narrow), n, at, has in zip(cases, count, offset, found, strict=True):
        whole = torch.frombuffer(bytearray(content[skip:]), dtype=torch.uint8)[: n * (4 if narrow else width)]
        got = written[at : at + n * width]
        if has != reference(got.numpy().tobytes(), width):
            raise ArithmeticError(f"a digest is wrong, at width {width}")
        if not (_rounded(whole, got) if narrow else torch.equal(whole, got)):
            raise ArithmeticError(f"a copy is wrong, at width {width}")


def _rounded(wide: Tensor, narrow: Tensor) -> bool:
    wanted, found = wide.view(torch.float32).to(torch.bfloat16), narrow.view(torch.bfloat16)
    nan = wanted.isnan()
    same = torch.equal(wanted[~nan].view(torch.int16), found[~nan].view(torch.int16))
    return same and torch.equal(nan, found.isnan())
