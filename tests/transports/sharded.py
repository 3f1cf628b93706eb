"""What each of several trainer ranks does: hold a share of every tensor (FSDP2 or a mesh), train, publish."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

VOCAB = 37


@contextmanager
def joined(address: str, rank: int, world_size: int, store: str) -> Iterator[Any]:
    """Join the trainer's own group, and connect to the engine."""
    import torch.distributed as dist

    from pitstop.transports import Publisher

    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    with Publisher.connect(address, rank=rank, world_size=world_size) as publisher:
        yield publisher
    dist.destroy_process_group()


def sharded(dtype: str, *, adapter: bool) -> Any:
    """Return a model of which this rank holds a share of every parameter; the same model on every rank."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from tests.transports.wrapped import Small, tuned

    torch.manual_seed(0)
    model: Any = tuned(dtype=getattr(torch, dtype)) if adapter else Small().to(getattr(torch, dtype))
    inner = model.base_model.model if adapter else model
    for layer in (inner.proj, inner.conv):
        fully_shard(layer)
    fully_shard(model)
    return model


def whole(model: Any, wanted: str) -> dict[str, str]:
    """Return what the engine is to hold, put together by torch's own way of saving such a model."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from tests.transports.children import sha

    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: sha(tensor.to(getattr(torch, wanted))) for name, tensor in state.items()}


def watch(log: list[tuple[int, int]], pause: Callable[[], float]) -> None:
    """Note when each gather of this rank begins and ends, and be late for it."""
    from pitstop.transports import gathering

    real = gathering._whole

    def noted(tensor: Any) -> Any:
        time.sleep(pause())
        begun = time.monotonic_ns()
        found = real(tensor)
        log.append((begun, time.monotonic_ns()))
        return found

    gathering._whole = noted


def train(
    connection: Connection, address: str, rank: int, world_size: int, store: str, dtype: str, wanted: str, versions: int
) -> None:
    """Step, publish, and go on training while the refit runs; every other version by its parameters' names."""
    import torch

    pause = random.Random(rank)
    gathers: list[tuple[int, int]] = []
    watch(gathers, lambda: pause.uniform(0, 0.005))
    with joined(address, rank, world_size, store) as publisher:
        model = sharded(dtype, adapter=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def learn() -> None:
            model(torch.randint(VOCAB, (4, 8))).float().square().mean().backward()

        learn()
        for version in range(1, versions + 1):
            optimizer.step()
            optimizer.zero_grad()
            expected = whole(model, wanted)
            gathers.clear()
            what = model if version % 2 else model.named_parameters()
            handle = publisher.publish(what, weight_version=version, cast="inventory")
            noted = list(gathers)
            time.sleep(pause.uniform(0, 0.02))
            learn()  # its gathers and scatters run while the refit does
            assert gathers == noted
            report = handle.result(30)
            connection.send((report.outcome.value, report.refit_id, expected if rank == 0 else None, noted))
            connection.recv()


def adapt(connection: Connection, address: str, rank: int, world_size: int, store: str, dtype: str) -> None:
    """Publish a sharded model with an adapter: spoilt on rank 0's word, mended, and named."""
    import torch

    from pitstop.engine.errors import PitstopError
    from pitstop.transports import merged

    with joined(address, rank, world_size, store) as publisher:
        model = sharded(dtype, adapter=True)
        up = model.base_model.model.proj.lora_B["default"].weight
        kept = up.to_local().clone()
        up.to_local().data.fill_(torch.nan)
        try:
            publisher.publish(model, weight_version=1)
        except PitstopError as error:
            connection.send((error.slug, str(error)))
        up.to_local().data.copy_(kept)
        for version, what in ((1, model), (2, merged(model, adapter="default"))):
            connection.send(publisher.publish(what, weight_version=version).result(30).outcome.value)
            connection.recv()


def disagree(connection: Connection, address: str, rank: int, world_size: int, store: str) -> None:
    """Publish something else than the other ranks, in several ways, and then the same."""
    from pitstop.engine.errors import PitstopError

    with joined(address, rank, world_size, store) as publisher:
        named = list(sharded("float32", adapter=False).state_dict(keep_vars=True).items())
        first, tensor = named[0]
        for wrong in (
            [*named[1:], named[0]],
            named[:-1],
            [("other.weight", tensor), *named[1:]],
            [(first, tensor.double()), *named[1:]],
            [(first, tensor.to_local()), *named[1:]],
        ):
            try:
                publisher.publish(wrong if rank == 2 else named, weight_version=1)
            except PitstopError as error:
                connection.send((error.slug, str(error)))
        connection.send(publisher.publish(named, weight_version=1).result(30).outcome.value)
        connection.recv()


def meshed(connection: Connection, address: str, rank: int, world_size: int, store: str) -> None:
    """Publish tensors that lie on a mesh of two dimensions, in every way that they can."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from tests.transports.children import sha

    with joined(address, rank, world_size, store) as publisher:
        torch.manual_seed(1)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        full = {
            "embed.weight": torch.randn(37, 16), "proj.weight": torch.randn(24, 16), "proj.bias": torch.randn(24),
            "conv.weight": torch.randn(24, 16), "conv.bias": torch.randn(16), "norm.weight": torch.randn(16),
            "norm.bias": torch.randn(16), "head.weight": torch.randn(37, 16),
        }  # fmt: skip
        placed = {
            "embed.weight": (Shard(0), Shard(1)), "proj.weight": (Replicate(), Shard(0)),
            "proj.bias": (Shard(0), Shard(0)), "conv.weight": (Shard(1), Replicate()),
            "conv.bias": (Replicate(), Replicate()), "norm.weight": (Shard(0), Replicate()),
        }  # fmt: skip
        named: dict[str, torch.Tensor] = {}
        for name, tensor in full.items():
            places = placed.get(name)
            named[name] = tensor if places is None else distribute_tensor(tensor, mesh, places)
        named["head.weight"] = DTensor.from_local(full["head.weight"] / 4, mesh, (Partial(), Partial()))
        report = publisher.publish(named, weight_version=1).result(30)
        connection.send((report.outcome.value, {name: sha(tensor) for name, tensor in full.items()}))
        connection.recv()
