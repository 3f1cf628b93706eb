"""A fleet of two real engines that receives in place: from the suspend to the first token of the new version."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pitstop.engine.errors import PitstopError
from pitstop.engine.fleet import Fleet
from pitstop.engine.handle import RefitHandle
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import NullObserver
from pitstop.engine.refit import Deadlines, Outcome, RefitOptions
from tests.checkpoints import tensors
from tests.vllm.conftest import Garage
from tests.vllm.file_transport import FileSending, FileTransport
from tests.vllm.harness import GREEDY, PROMPT, Replica

LONG = replace(GREEDY, max_tokens=400)
SHORT = replace(GREEDY, max_tokens=24)
IN_PLACE = RefitOptions(mode="in_place", deadlines=Deadlines(receive=5, control=3))


class Paddock(Fleet):
    """A fleet, its transport, and what its engines should make of versions 0 and 1."""

    def __init__(self, garage: Garage, transport: FileTransport) -> None:
        super().__init__([garage.backend("mixtral"), garage.backend("mixtral")], transport, NullObserver())
        self.files = transport

    def take(self, version: int, seed: int) -> RefitHandle:
        sending = FileSending(version, tensors("mixtral", seed))

        async def make() -> FileSending:
            return sending

        return self.offer(make, IN_PLACE, RefitHandle(sending.offer.refit_id, version))


@pytest.fixture
async def paddock(garage: Garage, tmp_path: Path, declared_receiver: str) -> AsyncIterator[Paddock]:
    transport = FileTransport(tmp_path, declared_receiver)
    async with Paddock(garage, transport) as fleet:
        yield fleet
    transport.close()


async def serves(fleet: Paddock, fresh: Replica, version: int) -> None:
    """Every replica makes what a fresh engine makes."""
    wanted = (await fresh.run()).token_ids
    made = await asyncio.gather(*(fleet.generate(PROMPT, SHORT) for _ in range(4)))
    assert {each.replica for each in made} == {"replica-0", "replica-1"}
    assert all(list(each.token_ids) == wanted and each.spans == ((version, 0, 24),) for each in made)


async def test_streams_go_on_under_the_version_that_came_in_place(paddock: Paddock, garage: Garage) -> None:
    fresh = await garage.start("mixtral", 1)
    streams = [asyncio.create_task(paddock.generate(PROMPT, LONG)) for _ in range(4)]
    await asyncio.sleep(0.3)
    report = await paddock.take(1, 1)
    assert (report.outcome, report.mode) == (Outcome.COMMITTED, "in_place")
    for made in await asyncio.gather(*streams):
        assert [version for version, _, _ in made.spans] == [0, 1]
        cut = made.spans[0][2]
        rest = await fresh.run(prompt=(*PROMPT, *made.token_ids[:cut]), max_tokens=400 - cut)
        assert list(made.token_ids[cut:]) == rest.token_ids
    await serves(paddock, fresh, 1)


@pytest.mark.parametrize("how", ["proof", "half way"])
async def test_a_torn_engine_says_nothing_until_the_next_refit_while_its_sibling_goes_on(
    paddock: Paddock, garage: Garage, how: str
) -> None:
    fresh = await garage.start("mixtral", 1)
    (paddock.files.spoiled if how == "proof" else paddock.files.halted).add("replica-0")
    streams = [asyncio.create_task(paddock.generate(PROMPT, LONG)) for _ in range(4)]
    await asyncio.sleep(0.3)
    report = await paddock.take(1, 1)
    assert report.outcome is Outcome.PARTIAL
    error = report.replicas["replica-0"].error
    assert (error is not None and error.slug) == ("digest_mismatch" if how == "proof" else "deadline_exceeded")
    assert [replica.phase for replica in paddock.replicas] == [Phase.QUARANTINED, Phase.SERVING]
    ends = await asyncio.gather(*streams, return_exceptions=True)
    assert sum(isinstance(end, PitstopError) for end in ends) == 2
    made = await asyncio.gather(*(paddock.generate(PROMPT, SHORT) for _ in range(4)))
    assert {each.replica for each in made} == {"replica-1"}
    paddock.files.spoiled.clear()
    paddock.files.halted.clear()
    assert (await paddock.take(2, 1)).outcome is Outcome.COMMITTED
    await serves(paddock, fresh, 2)


async def test_an_engine_that_dies_half_way_holds_up_nobody(paddock: Paddock) -> None:
    paddock.files.halted.add("replica-0")
    handle = paddock.take(1, 1)
    await paddock.replicas[0].reached(frozenset({Phase.RECEIVING}))
    await asyncio.sleep(0.5)
    booted = paddock.replicas[0].booted
    assert booted is not None
    assert booted.pid is not None
    os.kill(booted.pid, signal.SIGKILL)
    report = await asyncio.wait_for(handle, 10)
    assert report.outcome is Outcome.PARTIAL
    assert [replica.phase for replica in paddock.replicas] == [Phase.DEAD, Phase.SERVING]
    assert (await paddock.generate(PROMPT, SHORT)).spans == ((1, 0, 24),)
