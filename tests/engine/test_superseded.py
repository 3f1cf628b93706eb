"""A version that gives way to a newer one, at any moment: it is gone before the newer one is staged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import Outcome
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import Delays, Script, SimulatedBackend
from pitstop.engine.worker_ports import WorkerOp, WorkerReply
from tests.engine.sim import SimFleet, expected, until


class Narrow(SimulatedBackend):
    """Has room for one version, and remembers who wanted more."""

    def __init__(self) -> None:
        super().__init__(delays=Delays(call=0.001))
        self.received = 0
        self.twice: list[str] = []

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        if op.verb == "receive":
            self.received += 1
            if self._staged:
                self.twice.append(op.refit_id)
        return await super().call_workers(op)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_whenever_a_newer_version_comes_no_replica_ever_holds_two(replicas: int, slots: int) -> None:
    outcomes, received = [], 0
    for moment in (*range(0, 36, 2), "sent", "swapped"):
        backends = [Narrow() for _ in range(replicas)]
        async with SimFleet(backends) as engine:
            engine.transport.slots = slots
            generating = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=60)))
            first = engine.refit_to(1, script=_hanging() if moment == "sent" else None)
            if moment == "swapped":
                await engine.replicas[0].reached(frozenset({Phase.SUSPENDING}))
            elif moment == "sent":
                await until(partial(_all_receive, backends))
            else:
                for _ in range(int(moment)):
                    await asyncio.sleep(0.0005)
            second = engine.refit_to(2)
            assert (await second).outcome is Outcome.COMMITTED
            outcomes.append((await first).outcome)
            received += sum(backend.received for backend in backends)
            assert [backend.twice for backend in backends] == [[]] * replicas
            assert [list(backend._staged) for backend in backends] == [[]] * replicas
            done = await generating
            assert list(done.token_ids) == expected([1], done.spans)
    assert outcomes[-2:] == [Outcome.SUPERSEDED, Outcome.COMMITTED]
    assert received > len(outcomes) * replicas


async def test_versions_that_come_one_upon_the_other_leave_one_and_its_memory_only() -> None:
    backend = Narrow()
    async with SimFleet([backend]) as engine:
        script = Script()
        script.plan("send", "hang")
        handles = [engine.refit_to(1, script=script)]
        for version in range(2, 8):
            await asyncio.sleep(0.002)
            handles.append(engine.refit_to(version, script=None if version == 7 else _hanging()))
        reports = [await handle for handle in handles]
        assert [report.outcome for report in reports[:-1]] == [Outcome.SUPERSEDED] * 6
        assert reports[-1].outcome is Outcome.COMMITTED
        assert (backend.twice, backend._staged) == ([], {})


def _all_receive(backends: Sequence[Narrow]) -> bool:
    return all(backend.received for backend in backends)


def _hanging() -> Script:
    script = Script()
    script.plan("send", "hang")
    return script
