"""Publishers and an engine's coordinator: what becomes of several versions, and of a trainer that counts anew."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pitstop.engine import Outcome, SamplingParams
from pitstop.engine.errors import PeerLost, StaleVersion
from pitstop.transports import Publisher
from tests.transports.test_publisher import settled, shas
from tests.transports.weights import slow, weights
from tests.transports.wired import Wired

FIVE = SamplingParams(max_tokens=5)


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def test_of_quick_publishes_the_latest_wins() -> None:
    begun = threading.Event()
    async with Wired() as engine, await Publisher.connect_async(engine.address) as trainer:
        first = trainer.publish(slow(begun.set), weight_version=1)
        assert await asyncio.to_thread(begun.wait, 10)
        second = trainer.publish(weights(2), weight_version=2)
        third = trainer.publish(weights(3), weight_version=3)
        assert (await settled(third)).outcome is Outcome.COMMITTED
        assert (await settled(first)).outcome is Outcome.SUPERSEDED
        assert (await settled(second)).outcome is Outcome.SUPERSEDED
        assert first.sent.is_set()
        assert second.sent.is_set()
        assert engine.sim.content == shas(weights(3))
        assert (await engine.generate([1], FIVE)).spans == ((3, 0, 5),)


async def test_a_trainer_that_was_restarted_counts_anew_and_no_sample_is_newer_than_the_newest() -> None:
    async with Wired(weight_version=56) as engine:
        async with await Publisher.connect_async(engine.address) as before:
            await settled(before.publish(weights(57), weight_version=57))
        old = await engine.generate([1], FIVE)
        async with await Publisher.connect_async(engine.address) as trainer:
            assert trainer.weight_version == 57
            with pytest.raises(StaleVersion, match="rebase=True"):
                await settled(trainer.publish(weights(1), weight_version=1))
            assert (await settled(trainer.publish(weights(1), weight_version=1, rebase=True))).weight_version == 1
            assert engine.weight_version == 1
            assert engine.staleness(old) == 1
            await settled(trainer.publish(weights(2), weight_version=2))
        assert engine.sim.content == shas(weights(2))
        new = await engine.generate([1], FIVE)
        assert (engine.staleness(old), engine.staleness(new)) == (2, 0)


async def test_a_publisher_lives_through_a_restart_of_the_engine(tmp_path: Path) -> None:
    async with Wired(listen="tcp://:0", keys=tmp_path / "keys") as engine:
        address = engine.tcp_address
        assert address is not None
        trainer = await Publisher.connect_async(address, reconnect=True)
        await settled(trainer.publish(weights(1), weight_version=1))
    listen = address.partition("?")[0]
    async with Wired(listen=listen, keys=tmp_path / "keys") as engine:
        assert (await settled(trainer.publish(weights(2), weight_version=2))).outcome is Outcome.COMMITTED
        assert engine.sim.content == shas(weights(2))
        await trainer.aclose()


async def test_a_publisher_that_was_not_asked_to_reconnect_says_to_connect_again(tmp_path: Path) -> None:
    async with Wired() as engine:
        trainer = await Publisher.connect_async(engine.address)
        await settled(trainer.publish(weights(1), weight_version=1))
    await asyncio.to_thread(trainer._link.thread.join, 10)
    with pytest.raises(PeerLost, match=r"connect again, .*reconnect=True"):
        trainer.publish(weights(2), weight_version=2)
    await trainer.aclose()
