"""Trainers whose tensors are spread over their ranks: four processes over gloo, FSDP2 and meshes, to a whole engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pitstop.engine.errors import OfferRejected
from pitstop.transports.gathering import Declared
from pitstop.transports.packing import Slot
from pitstop.transports.sources import source_of
from pitstop.transports.tensor_source import TensorSource
from tests.transports import sharded
from tests.transports.children import Child, Sink, child
from tests.transports.test_publisher import shas
from tests.transports.test_sources import raw, sent
from tests.transports.weights import inventory
from tests.transports.wired import Wired
from tests.transports.wrapped import Small, tuned

RANKS = 4


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Wired]:
    """Describe an engine of `Small`, whose receiver sleeps at random."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    landed, pause = Sink.landed, random.Random(0)

    def slowly(sink: Sink, bucket: Any) -> None:
        time.sleep(pause.uniform(0, 0.05))
        landed(sink, bucket)

    monkeypatch.setattr(Sink, "landed", slowly)

    def make(dtype: str) -> Wired:
        wired = Wired()
        wired.sim.specs = inventory(Small().to(getattr(torch, dtype)).state_dict()).tensors
        return wired

    return make


class Ranks:
    def __init__(self, stack: ExitStack, target: Callable[..., None], engine: Wired, folder: Path, *more: Any) -> None:
        self.children: list[Child] = [
            stack.enter_context(child(target, engine.address, rank, RANKS, str(folder / "store"), *more))
            for rank in range(RANKS)
        ]

    async def said(self) -> list[Any]:
        return [await asyncio.to_thread(one.answer, 60.0) for one in self.children]

    def go(self) -> None:
        for one in self.children:
            one.pipe.send("go")

    async def ended(self) -> None:
        for one in self.children:
            await asyncio.to_thread(one.process.join, 20)
            assert one.process.exitcode == 0


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
async def test_b29_four_ranks_gather_in_step_train_on_during_the_refit_and_the_engine_gets_every_bit(
    engine: Callable[[str], Wired], tmp_path: Path, dtype: str, wanted: str
) -> None:
    versions = 7
    async with engine(wanted) as fleet:
        with ExitStack() as stack:
            ranks = Ranks(stack, sharded.train, fleet, tmp_path, dtype, wanted, versions)
            before: dict[str, str] = {}
            for version in range(1, versions + 1):
                said = await ranks.said()
                assert {answer[0] for answer in said} == {"committed"}
                assert len({answer[1] for answer in said}) == 1
                expected = said[0][2]
                assert fleet.sim.content == expected != before
                assert fleet.weight_version == version
                before = expected
                for gathers in zip(*(answer[3] for answer in said), strict=True):
                    # Nobody is through with a gather before everybody has come to it.
                    assert max(begun for begun, _ in gathers) <= min(ended for _, ended in gathers)
                ranks.go()
            await ranks.ended()


async def test_a_sharded_model_with_an_adapter_is_merged_and_what_rank_0_cannot_send_fails_on_every_rank(
    engine: Callable[[str], Wired], tmp_path: Path
) -> None:
    expected = shas(sent(source_of(tuned())))
    async with engine("float32") as fleet:
        with ExitStack() as stack:
            ranks = Ranks(stack, sharded.adapt, fleet, tmp_path, "float32")
            said = await ranks.said()
            assert [slug for slug, _ in said] == ["merge_unproven"] + ["offer_rejected"] * (RANKS - 1)
            assert "proj.weight" in said[0][1]
            assert all("another rank" in message for _, message in said[1:])
            for version in (1, 2):
                assert await ranks.said() == ["committed"] * RANKS
                assert fleet.weight_version == version
                assert fleet.sim.content == expected
                fleet.sim.content = None
                ranks.go()
            await ranks.ended()


async def test_ranks_that_do_not_publish_alike_are_told_before_anything_is_gathered_and_may_go_on(
    engine: Callable[[str], Wired], tmp_path: Path
) -> None:
    async with engine("float32") as fleet:
        with ExitStack() as stack:
            ranks = Ranks(stack, sharded.disagree, fleet, tmp_path)
            for _ in range(5):
                for slug, message in await ranks.said():
                    assert slug == "publish_order"
                    assert "same tensors in the same order" in message
            assert await ranks.said() == ["committed"] * RANKS
            ranks.go()
            await ranks.ended()


async def test_tensors_on_a_mesh_of_two_dimensions_arrive_whole_however_they_are_placed(
    engine: Callable[[str], Wired], tmp_path: Path
) -> None:
    async with engine("float32") as fleet:
        with ExitStack() as stack:
            ranks = Ranks(stack, sharded.meshed, fleet, tmp_path)
            for outcome, expected in await ranks.said():
                assert outcome == "committed"
                assert fleet.sim.content == expected
            ranks.go()
            await ranks.ended()


# -- in this process, alone ------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_rank_that_does_not_send_keeps_nothing_of_what_it_gathers(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.randn(9, 4)
    named = {"a": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.randn(3)}
    source = source_of(named, keep=False)
    assert isinstance(source, Declared)
    assert source.specs() == source_of(named).specs()
    with pytest.raises(OfferRejected, match="another rank"):
        source.pack([Slot(0, "float32", 0)], None, np.zeros(1, np.uint64))  # type: ignore[arg-type]
    source.close()
    found = sent(source_of(named))
    assert raw(found["a"]) == raw(whole)


def test_what_was_gathered_is_not_the_trainers_memory(alone: None) -> None:
    whole = torch.randn(9, 4)
    mine: Any = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    source = source_of({"a": mine})
    mine.to_local().zero_()
    assert raw(sent(source)["a"]) == raw(whole)


def test_a_tensor_of_other_ranks_is_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = distribute_tensor(torch.randn(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    monkeypatch.setattr(type(mine.device_mesh), "get_coordinate", lambda _: None)
    with pytest.raises(OfferRejected, match="far is spread over ranks that this one is not among"):
        source_of({"far": mine})


def test_tensors_that_are_whole_are_not_gathered() -> None:
    assert type(source_of({"a": torch.ones(2)}, keep=False)) is TensorSource
    assert not isinstance(torch.ones(1), DTensor)
