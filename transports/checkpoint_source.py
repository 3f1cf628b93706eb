"""A checkpoint folder as a source: read with `pread`, straight into the segment.

Files are not mapped: a mapped file that is overwritten in place changes under the reader, and one that is cut short
kills it. Every file stays open from the offer on, so that replacing one by renaming changes nothing for us; that it
is still the same and unchanged is checked before and after it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import CheckpointUnreadable, names
from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec
from pitstop.transports.digest import CALL_BYTES, NARROW, Work
from pitstop.transports.packing import Checks, Slot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pitstop.transports.segment import Mapping

_DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_MOST_HEADER: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    file: int
    begin: int
    spec: TensorSpec


class CheckpointSource:
    """A folder of safetensors, whole or in shards with an index, or one safetensors file.

    Raises:
        CheckpointUnreadable: names the file that is absent, cut short, or does not fit the index.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._stack = ExitStack()
        self._files: list[tuple[Path, int, tuple[int, ...]]] = []
        self._entries: list[_Entry] = []
        try:
            self._open(Path(path))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._stack.close()

    @property
    def files(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What was opened: paths, and which files and states of files lay there."""
        return tuple((str(path), state) for path, _, state in self._files)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return what there is, in the order in which it lies in the files."""
        return tuple(entry.spec for entry in self._entries)

    def tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Read one tensor after the other into memory of its own."""
        import torch

        self._unchanged()
        for entry in self._entries:
            tensor = torch.empty(entry.spec.shape, dtype=getattr(torch, entry.spec.dtype))
            if tensor.numel():
                content = tensor.view(-1).view(torch.uint8).numpy().data
                self._read(entry, 0, content)
            yield entry.spec, tensor
        self._unchanged()

    def pack(self, slots: Sequence[Slot], into: Mapping, digests: NDArray[np.uint64]) -> Iterator[int]:
        """See `packing.Source.pack`."""
        self._unchanged()
        segment, checks, scratch = into.bytes.data, Checks(digests), bytearray()
        for row, slot in enumerate(slots):
            entry = self._entries[slot.index]
            digests[row] = 0
            if entry.spec.dtype != slot.dtype:
                scratch = scratch or bytearray(CALL_BYTES)
                yield from self._cast(row, slot, entry, into, scratch, checks, digests)
                continue
            width = ITEMSIZE[slot.dtype]
            for low, nbytes in _pieces(entry, slot):
                at = slot.offset + low - slot.start * width
                self._read(entry, slot.base * width + low, segment[at : at + nbytes])
                yield 0
                yield from checks.add(row, into.address + at, width, nbytes // width, low // width)
        yield from checks.flush()
        self._unchanged()

    def _cast(
        self,
        row: int,
        slot: Slot,
        entry: _Entry,
        into: Mapping,
        scratch: bytearray,
        checks: Checks,
        digests: NDArray[np.uint64],
    ) -> Iterator[int]:
        import numpy as np
        import torch

        has, wanted = ITEMSIZE[entry.spec.dtype], ITEMSIZE[slot.dtype]
        wide = np.frombuffer(scratch, np.uint8)
        for low, nbytes in _pieces(entry, slot):
            self._read(entry, slot.base * has + low, memoryview(scratch)[:nbytes])
            yield 0
            count, start = nbytes // has, low // has
            at = slot.offset + (start - slot.start) * wanted
            target = into.address + at
            if (entry.spec.dtype, slot.dtype) == ("float32", "bfloat16"):
                work = Work(
                    NARROW,
                    np.array([has]),
                    np.array([wide.ctypes.data], np.uint64),
                    np.array([target], np.uint64),
                    np.array([count]),
                    np.array([start]),
                )
                yield from work
                digests[row : row + 1] += work.digests
                continue
            read = torch.from_numpy(wide[:nbytes]).view(getattr(torch, entry.spec.dtype))
            into.tensor(slot.dtype, (count,), at).copy_(read)
            yield from checks.add(row, target, wanted, count, start)

    def _read(self, entry: _Entry, low: int, buffer: memoryview) -> None:
        path, fd, _ = self._files[entry.file]
        at, done = entry.begin + low, 0
        while done < len(buffer):
            try:
                got = os.preadv(fd, [buffer[done:]], at + done)
            except OSError as error:
                raise CheckpointUnreadable(f"{path} cannot be read: {error.strerror}", file=str(path)) from None
            if not got:
                raise CheckpointUnreadable(f"{path} was cut short while it was read", file=str(path))
            done += got

    def _open(self, path: Path) -> None:
        if path.is_file():
            self._shard(path)
            return
        if not path.is_dir():
            raise CheckpointUnreadable(f"{path} does not exist", file=str(path))
        index = path / _INDEX
        if not index.is_file():
            if not (path / _SINGLE).is_file():
                there = names([p.name for p in path.glob("*.safetensors")]) or "no safetensors file at all"
                raise CheckpointUnreadable(f"{path} has neither {_SINGLE} nor {_INDEX}, but {there}", file=str(path))
            self._shard(path / _SINGLE)
            return
        weights = self._indexed(index)
        for file in sorted(set(weights.values())):
            found = {entry.spec.name for entry in self._shard(path / file)}
            listed = {name for name, home in weights.items() if home == file}
            if found != listed:
                odd = found ^ listed
                raise CheckpointUnreadable(
                    f"{path / file} and {_INDEX} disagree about {names(list(odd))}", file=str(path / file)
                )

    def _indexed(self, index: Path) -> dict[str, str]:
        try:
            weights = json.loads(self._kept(index))["weight_map"]
            fine = bool(weights) and all(isinstance(v, str) and Path(v).name == v for v in weights.values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointUnreadable(f"{index} is not an index: {error}", file=str(index)) from None
        if not fine:
            raise CheckpointUnreadable(f"{index} lists no files, or files elsewhere", file=str(index))
        return dict(weights)

    def _kept(self, path: Path, most: int = _MOST_HEADER) -> bytes:
        """Open a file for good, and return its first bytes."""
        try:
            file = self._stack.enter_context(path.open("rb", buffering=0))
        except OSError as error:
            raise CheckpointUnreadable(f"{path} cannot be read: {error.strerror}", file=str(path)) from None
        self._files.append((path, file.fileno(), _state(os.fstat(file.fileno()))))
        return os.pread(file.fileno(), most, 0)

    def _shard(self, path: Path) -> list[_Entry]:
        start = self._kept(path, 8)
        number = len(self._files) - 1
        _, fd, state = self._files[number]
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 0 < length <= min(_MOST_HEADER, state[2] - 8):
            raise CheckpointUnreadable(f"{path} is half-written: its header is not whole", file=str(path))
        try:
            header: dict[str, Any] = json.loads(os.pread(fd, length, 8))
            header.pop("__metadata__", None)
            entries, end = [], 0
            for name, told in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
                entry = _Entry(number, 8 + length + told["data_offsets"][0], _spec(path, name, told))
                if told["data_offsets"] != [end, end + entry.spec.nbytes]:
                    raise CheckpointUnreadable(f"{path}: {name} does not lie where its size says", file=str(path))
                end += entry.spec.nbytes
                entries.append(entry)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointUnreadable(f"{path}: its header cannot be read: {error}", file=str(path)) from None
        if 8 + length + end != state[2]:
            raise CheckpointUnreadable(
                f"{path} has {state[2]} bytes, its header says {8 + length + end}: half-written", file=str(path)
            )
        self._entries += entries
        return entries

    def _unchanged(self) -> None:
        for path, fd, state in self._files:
            try:
                same = _state(os.fstat(fd)) == state == _state(path.stat())
            except OSError:
                same = False
            if not same:
                raise CheckpointUnreadable(f"{path} was changed or replaced after it was opened", file=str(path))


def _pieces(entry: _Entry, slot: Slot) -> Iterator[tuple[int, int]]:
    """Yield first byte in the row and number of bytes of what one call reads for a slot."""
    width = ITEMSIZE[entry.spec.dtype]
    count = entry.spec.nbytes // width if slot.count is None else slot.count
    end = (slot.start + count) * width
    for low in range(slot.start * width, end, CALL_BYTES):
        yield low, min(CALL_BYTES, end - low)


def _spec(path: Path, name: str, told: dict[str, Any]) -> TensorSpec:
    dtype = _DTYPES.get(told["dtype"])
    if dtype is None:
        raise CheckpointUnreadable(f"{path}: {name} has the dtype {told['dtype']}", file=str(path), tensor=name)
    shape = tuple(int(length) for length in told["shape"])
    if prod(shape) < 0:
        raise CheckpointUnreadable(f"{path}: {name} has the shape {shape}", file=str(path), tensor=name)
    return TensorSpec(name, dtype, shape)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
