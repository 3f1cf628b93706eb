"""Tensors that are spread over a trainer's ranks (DTensors, FSDP2), made whole one at a time.

Every rank runs the same loop over the same names, in the thread that publishes, and no rank gets ahead of another by
more than one tensor: a gather ends when all have come to it. When the loop is over nothing more is gathered, so what
the trainer does on its own groups while the refit runs cannot meet a gather.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import OfferRejected, PitstopError, PublishOrder, WorkerFailed
from pitstop.engine.worker_ports import TensorSpec
from pitstop.transports.adapters import Delta, Part
from pitstop.transports.merging import merge
from pitstop.transports.packing import Slot
from pitstop.transports.tensor_source import TensorSource, spread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pitstop.transports.packing import Source
    from pitstop.transports.segment import Mapping


class Declared:
    """Names, dtypes and shapes of what another rank sends."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs: Final = tuple(specs)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return what there is, in order."""
        return self._specs

    def pack(self, slots: Sequence[Slot], into: Mapping, digests: NDArray[np.uint64]) -> Iterator[int]:
        """Refuse: this rank has kept nothing."""
        raise OfferRejected("the tensors were gathered for another rank to send")

    def close(self) -> None:
        """Do nothing."""


def gathered(parts: Sequence[Part], *, keep: bool) -> Source:
    """Make every tensor whole, on every rank of its mesh, and return the source of it.

    Where `keep`, what was gathered or merged is kept in memory of the host, apart from the trainer's: on a device there
    is one at a time.

    Raises:
        PublishOrder: the ranks do not have the same tensors in the same order. Nothing was gathered.
        OfferRejected: a rank is not among those of a tensor, or another rank could not read its own.
    """
    meshes = _meshes(parts)
    _same_everywhere(parts, meshes)
    kept: list[tuple[str, Tensor]] = []
    failed: PitstopError | None = None
    for part in parts:
        tensors = [_whole(tensor) for tensor in part.tensors()]
        # A rank that stopped here would leave the others in a gather that it never joins.
        if failed is None and keep:
            try:
                kept.append((part.name, _made(part, tensors)))
            except PitstopError as error:
                failed = error
            except Exception as error:  # noqa: BLE001
                failed = WorkerFailed(f"{part.name} could not be kept: {error!r}", operation="gather")
    elsewhere = _most([int(failed is not None)], meshes)[0]
    if failed is not None:
        raise failed
    if elsewhere:
        raise OfferRejected("another rank could not read what it is to send; it says why")
    return TensorSource(kept) if keep else Declared([_spec(part) for part in parts])


def _whole(tensor: Tensor) -> Tensor:
    if not spread(tensor):
        return tensor
    import torch

    distributed: Any = tensor
    with torch.no_grad():
        here, there = distributed.device.type, distributed.device_mesh.device_type
        # Shards that were offloaded to the host lie where the mesh's ranks cannot talk.
        local = distributed.detach() if here == there else distributed.detach().to(there)
        whole: Tensor = local.full_tensor()
    return whole


def _made(part: Part, tensors: Sequence[Tensor]) -> Tensor:
    if part.delta is not None:
        whole, up, down = tensors
        return merge(part.name, whole, Delta(up, down, part.delta.scaling, part.delta.transposed)).cpu()
    if not spread(part.tensor):
        return part.tensor
    kept, mine = tensors[0].cpu(), _local(part.tensor)
    # What one rank holds all of is not copied by a gather.
    return kept.clone() if kept.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr() else kept


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.detach().to_local()
    return local


def _spec(part: Part) -> TensorSpec:
    return TensorSpec(part.name, str(part.tensor.dtype).removeprefix("torch."), tuple(part.tensor.shape))


def _meshes(parts: Sequence[Part]) -> list[Any]:
    meshes: list[Any] = []
    for part in parts:
        for tensor in part.tensors():
            if not spread(tensor):
                continue
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            if mesh.get_coordinate() is None:
                raise OfferRejected(f"{part.name} is spread over ranks that this one is not among", tensor=part.name)
            if mesh not in meshes:
                meshes.append(mesh)
    return meshes


def _same_everywhere(parts: Sequence[Part], meshes: Sequence[Any]) -> None:
    told = [
        (part.name, str(part.tensor.dtype), tuple(part.tensor.shape), [spread(tensor) for tensor in part.tensors()])
        for part in parts
    ]
    mine = int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:7])
    most, least = _most([mine, -mine], meshes)
    if most != -least:
        raise PublishOrder(
            f"the ranks do not publish the same tensors in the same order ({len(parts)} on this one, "
            f"{parts[0].name} to {parts[-1].name}): every rank gives all of them, alike"
        )


def _most(numbers: Sequence[int], meshes: Sequence[Any]) -> list[int]:
    """Return the largest of what every rank says, number by number."""
    import torch
    import torch.distributed as dist

    said = list(numbers)
    for mesh in meshes:
        tensor = torch.tensor(said, dtype=torch.int64, device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        said = tensor.tolist()
    return said
