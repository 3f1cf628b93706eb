"""A publisher whose engine goes away and comes back, or does not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pitstop.engine.errors import AccessDenied, EngineClosed, PeerLost
from pitstop.engine.refit import Outcome
from pitstop.transports import Publisher
from tests.transports.children import Worker
from tests.transports.rig import rig, until
from tests.transports.test_publisher import settled
from tests.transports.weights import weights


async def test_what_was_open_fails_and_what_comes_later_goes_to_the_new_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await Publisher.connect_async(engine.link.address, reconnect=True)
        lost = trainer.publish(weights(1), weight_version=1)
        await engine.offer()
    with pytest.raises(PeerLost):
        await settled(lost)
    early = trainer.publish(weights(2), weight_version=2)
    async with rig(tmp_path) as engine:
        for handle in (early, trainer.publish(weights(3), weight_version=3)):
            sending = await engine.offer()
            assert sending.offer.refit_id == handle.refit_id
            await engine.refit(sending, [Worker()])
            assert (await settled(handle)).outcome is Outcome.COMMITTED
        await trainer.aclose()


async def test_an_engine_that_does_not_come_back_in_time_is_lost(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await Publisher.connect_async(engine.link.address, reconnect=True, timeout=1.0)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"not come back in 1 s"):
        await settled(trainer.publish(weights(1), weight_version=1))
    assert 0.9 < time.monotonic() - began < 5
    with pytest.raises(PeerLost):
        await settled(trainer.publish(weights(2), weight_version=2))
    await trainer.aclose()


async def test_closing_does_not_wait_for_an_engine_to_come_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await Publisher.connect_async(engine.link.address, reconnect=True)
    handle = trainer.publish(weights(1), weight_version=1)
    await asyncio.sleep(0.7)
    began = time.monotonic()
    await trainer.aclose()
    assert time.monotonic() - began < 3
    with pytest.raises(EngineClosed):
        await settled(handle)


async def test_an_engine_that_comes_back_with_other_keys_ends_the_publisher(tmp_path: Path) -> None:
    async with rig(tmp_path / "a", listen="tcp://:0") as engine:
        address = engine.link.tcp_address
        assert address is not None
        kept = tmp_path / "kept.key"
        kept.touch(0o600)
        kept.write_bytes((tmp_path / "a/client.key").read_bytes())
        address = address.partition("?")[0]
        trainer = await Publisher.connect_async(f"{address}?key={kept}", reconnect=True)
    async with rig(tmp_path / "b", listen=address):
        await until(lambda: not trainer._link.thread.is_alive())
        with pytest.raises(AccessDenied):
            trainer.publish(weights(1), weight_version=1)
    await trainer.aclose()


async def test_a_connect_that_is_cancelled_leaves_no_connection(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        connecting = asyncio.ensure_future(Publisher.connect_async(engine.link.address))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await asyncio.sleep(0.3)
        await until(lambda: not engine.link._clients)
