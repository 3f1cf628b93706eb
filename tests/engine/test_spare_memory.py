"""Where trainer and engine share a GPU, what it has to spare is asked for when a refit needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from pitstop.engine import Outcome
from pitstop.engine.errors import PitstopError, RemoteError
from pitstop.engine.handle import RefitHandle
from pitstop.engine.ports import Booted
from pitstop.engine.refit import RefitOptions
from pitstop.engine.simulated import SimulatedBackend, SimulatedSending, SimulatedTransport
from pitstop.engine.worker_ports import Offer, WorkerOp, WorkerReply
from tests.engine.sim import SimFleet

GPU = "cuda:the-one"


class OnGpu(SimulatedBackend):
    spare = 1

    async def start(self, replica: str, incarnation: int) -> Booted:
        booted = await super().start(replica, incarnation)
        self.ranks = tuple(replace(rank, device_id=GPU, spare_nbytes=999) for rank in booted.layout)
        return replace(booted, layout=self.ranks)

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        if op.verb != "describe":
            return await super().call_workers(op)
        if self.spare < 0:
            raise RemoteError("does not say")
        return [WorkerReply(rank.rank, layout=replace(rank, spare_nbytes=self.spare)) for rank in self.ranks]


async def seen(device: str, *spare: int) -> tuple[list[tuple[str, int]], Outcome]:
    sims = [OnGpu() for _ in spare]
    async with SimFleet(sims) as engine:
        found: list[tuple[str, int]] = []
        plan = engine.transport.plan

        async def planned(offer: Offer, manifest: Any, receivers: Any, *more: Any) -> Any:
            found.extend((rank.replica, rank.spare_nbytes) for rank in receivers)
            return await plan(offer, manifest, receivers, *more)

        assert isinstance(engine.transport, SimulatedTransport)
        engine.transport.plan = planned  # type: ignore[method-assign, assignment]
        for sim, has in zip(sims, spare, strict=True):
            sim.spare = has
        offer = Offer(uuid4().hex, 1, tuple(sims[0].specs), device=device)

        async def make() -> SimulatedSending:
            return SimulatedSending(offer)

        handle = engine.offer(make, RefitOptions(), RefitHandle(offer.refit_id, 1))
        with contextlib.suppress(PitstopError):
            await handle
        assert handle.report is not None
        return found, handle.report.outcome


async def test_spare_memory_is_asked_for_at_each_refit_from_the_same_gpu() -> None:
    assert await seen(GPU, 5, 7) == ([("replica-0", 5), ("replica-1", 7)], Outcome.COMMITTED)


async def test_elsewhere_nobody_is_asked() -> None:
    assert await seen("", 5, 7) == ([("replica-0", 999), ("replica-1", 999)], Outcome.COMMITTED)


async def test_a_replica_that_does_not_say_takes_no_part_and_the_others_do() -> None:
    assert await seen(GPU, -1, 7) == ([("replica-1", 7)], Outcome.PARTIAL)


async def test_if_no_replica_says_the_refit_fails_and_nothing_was_suspended() -> None:
    assert await seen(GPU, -1, -1) == ([], Outcome.FAILED)
