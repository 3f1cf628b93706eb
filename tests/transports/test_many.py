"""More publishes at a time than one client may have open at the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pitstop.engine.refit import Outcome, RefitReport
from pitstop.transports import Publisher
from pitstop.transports.remote import RemoteSending
from pitstop.transports.session import MOST_OPEN
from tests.transports.rig import Rig, rig
from tests.transports.test_publisher import settled
from tests.transports.weights import weights


async def displace(engine: Rig, sending: RemoteSending) -> None:
    offer = sending.offer
    await sending.settled(
        RefitReport(offer.refit_id, offer.weight_version, Outcome.SUPERSEDED, "shared_memory", 0, 0, 0.1, 0.0)
    )


@pytest.mark.parametrize("world_size", [1, 2])
async def test_what_is_too_much_at_once_waits_for_its_turn_in_order(tmp_path: Path, world_size: int) -> None:
    count = 3 * MOST_OPEN
    async with rig(tmp_path) as engine:
        ranks = [
            await asyncio.to_thread(Publisher.connect, engine.link.address, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        tensors = weights(1)
        handles = [[one.publish(tensors, weight_version=v) for v in range(count)] for one in ranks]
        for version in range(count):
            if version == 0:
                held = [await engine.offer() for _ in range(MOST_OPEN)]
                await asyncio.sleep(0.3)
                # No more than the engine would take: the rest waits here.
                assert engine.offers.empty()
            sending = held[version] if version < MOST_OPEN else await engine.offer()
            assert sending.offer.weight_version == version
            await displace(engine, sending)
        for handle in [handle for rank in handles for handle in rank]:
            assert (await settled(handle)).outcome is Outcome.SUPERSEDED
        assert engine.link.violations == 0
        for one in ranks:
            await asyncio.to_thread(one.close)


async def test_what_waits_for_its_turn_ends_with_the_publisher(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await asyncio.to_thread(Publisher.connect, engine.link.address)
        handles = [trainer.publish(weights(1), weight_version=v) for v in range(MOST_OPEN + 5)]
        await engine.offer()
        await asyncio.to_thread(trainer.close)
        assert all(handle.done() and handle.sent.is_set() for handle in handles)
