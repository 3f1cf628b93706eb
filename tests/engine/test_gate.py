"""The way in: nobody passes a closed gate, and a closed and drained gate has nobody on the way."""

from __future__ import annotations

import asyncio

import pytest

from pitstop.engine.errors import CacheResetRefused, IllegalEvent, NotServing
from pitstop.engine.gate import Gate
from pitstop.engine.ledger import Commit, Ledger
from pitstop.engine.lifecycle import Phase
from pitstop.engine.request import Request, SamplingParams
from pitstop.engine.simulated import SimulatedBackend, SimulatedLeg
from pitstop.engine.worker_ports import WorkerOp, WorkerReply
from tests.engine.sim import SimFleet, expected


def test_a_closed_gate_gives_no_lease() -> None:
    gate = Gate()
    with pytest.raises(NotServing), gate.lease():
        pass


async def test_a_closed_gate_is_drained_only_when_every_lease_is_back() -> None:
    gate = Gate()
    gate.open(Commit("r", 1, 0))
    with gate.lease():
        gate.close()
        drained = asyncio.create_task(gate.drained())
        await asyncio.sleep(0)
        assert not drained.done()
    await asyncio.wait_for(drained, 1)


def test_an_incarnation_that_is_over_commits_nothing() -> None:
    ledger = Ledger()
    first = ledger.born("r")
    ledger.commit("r", first, 3)
    second = ledger.born("r")
    assert ledger.committed("r") is None
    with pytest.raises(IllegalEvent):
        ledger.commit("r", first, 4)
    assert ledger.commit("r", second, 0).weight_version == ledger.oldest == 0
    ledger.revoke("r")
    assert ledger.oldest is None


class _Writes(SimulatedBackend):
    """Takes five milliseconds to write, and notes any step while it does."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = False
        self.offences = 0

    async def call_workers(self, op: WorkerOp) -> list[WorkerReply]:
        if op.verb != "apply":
            return list(await super().call_workers(op))
        self.writing = True
        try:
            await asyncio.sleep(0.005)
            return list(await super().call_workers(op))
        finally:
            self.writing = False

    def _step(self) -> None:
        self.offences += self.writing
        super()._step()


async def test_twenty_submitters_and_two_hundred_refits_never_meet_in_a_write() -> None:
    backend = _Writes()
    async with SimFleet([backend]) as engine:
        stop = asyncio.Event()
        served = 0

        async def submitter(n: int) -> None:
            nonlocal served
            while not stop.is_set():
                done = await engine.generate([n], SamplingParams(max_tokens=3))
                assert done.finish_reason == "length"
                served += 1

        tasks = [asyncio.create_task(submitter(n)) for n in range(20)]
        for version in range(1, 201):
            await engine.refit_to(version)
        stop.set()
        await asyncio.gather(*tasks)
        assert backend.offences == 0
        assert served > 200


class _SlowDoor(SimulatedBackend):
    """Takes its time to accept a request."""

    async def submit(self, request: Request) -> SimulatedLeg:
        await asyncio.sleep(0.05)
        return await super().submit(request)


async def test_a_refit_waits_for_a_request_that_is_on_its_way_into_the_engine() -> None:
    async with SimFleet([_SlowDoor()]) as engine:
        request = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=5)))
        await asyncio.sleep(0.01)
        await engine.refit_to(1)
        done = await request
        assert list(done.token_ids) == expected([1], done.spans)


class _KeepsItsCache(SimulatedBackend):
    """Answers a cache reset with no."""

    async def reset_cache(self) -> bool:
        return False


async def test_an_engine_that_refuses_a_cache_reset_does_not_serve_the_new_version() -> None:
    async with SimFleet([_KeepsItsCache()]) as engine:
        with pytest.raises(CacheResetRefused):
            await engine.refit_to(1)
        assert engine.phase() is Phase.QUARANTINED
