"""A GPU that is the host's memory: rings are lent and borrowed within this process, all else is what runs on one."""

from __future__ import annotations

import itertools
from typing import Final

import pytest
import torch
from torch import Tensor

from pitstop.engine.worker_ports import WorkerLayout
from pitstop.transports import cuda_memory, memory_link, tensor_source

GPU: Final = "cuda:pretended"
CPU: Final = torch.device("cpu")
RINGS: Final[dict[bytes, LentRing]] = {}
_count = itertools.count()


class LentRing:
    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.content: Tensor = torch.zeros(nbytes + 512, dtype=torch.uint8)
        self.address = -(-self.content.data_ptr() // 512) * 512
        self.handle = next(_count).to_bytes(64, "little")
        RINGS[self.handle] = self

    def bytes(self) -> Tensor:
        """What lies in its slots."""
        return cuda_memory.over(self.address, self.nbytes, CPU, self)


class BorrowedRing:
    def __init__(self, device: torch.device, handle: bytes, nbytes: int) -> None:
        self.device, self.handle, self.nbytes = device, handle, nbytes
        self._lent = RINGS[handle]
        self.address, self.closed = self._lent.address, False


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Have everybody believe that tensors lie on `GPU`."""

    def device_of(identity: str) -> torch.device:
        assert identity == GPU
        return CPU

    for name, value in (("LentRing", LentRing), ("BorrowedRing", BorrowedRing), ("device_of", device_of)):
        patch.setattr(cuda_memory, name, value)
    patch.setattr(tensor_source, "_device", lambda _: GPU)
    patch.setattr(memory_link, "_rings", {})


def layout(rank: int, ranks: int, pid: int, spare: int) -> WorkerLayout:
    """Return a rank on it, with so much of its memory to spare."""
    return WorkerLayout("r0", 1, rank, ranks, pid, GPU, GPU, spare)
