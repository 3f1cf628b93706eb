"""The last version can be delivered again, to replicas that lost it, for as long as it lies in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pitstop.engine.errors import OfferRejected
from pitstop.engine.worker_ports import Manifest
from pitstop.transports.memory_link import memory_sending
from tests.transports.children import Worker, sha
from tests.transports.rig import rig
from tests.transports.weights import weights


async def test_the_last_version_is_delivered_again_without_its_trainer(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        assert engine.transport.replay(1) is None
        first, second = Worker(), Worker()
        sending = memory_sending(weights(1), weight_version=1, headers={"traceparent": "x"})
        assert (await engine.refit(sending, [first], release=False)).error is None
        assert engine.transport.replay(2) is None
        # The first worker holds on to what landed: reading it again takes nothing away from it.
        for _ in range(2):
            replay = engine.transport.replay(1)
            assert replay is not None
            assert replay.offer.refit_id != sending.offer.refit_id
            assert (replay.offer.tensors, replay.offer.headers) == (sending.offer.tensors, {})
            assert (await engine.refit(replay, [second], release=False)).error is None
            expected = {name: sha(tensor) for name, tensor in weights(1).items()}
            assert await asyncio.to_thread(first.content) == expected
            assert await asyncio.to_thread(second.content) == expected
            await engine.release(replay, [second])
        await engine.release(sending, [first])
        assert engine.transport.replay(1) is not None
        assert len(set(engine.buffers)) == 1


async def test_a_version_that_was_written_over_is_gone(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        worker = Worker()
        assert (await engine.refit(memory_sending(weights(1), weight_version=1), [worker])).error is None
        early = engine.transport.replay(1)
        assert early is not None
        assert (await engine.refit(memory_sending(weights(2), weight_version=2), [worker])).error is None
        assert engine.transport.replay(1) is None
        report = await engine.refit(early, [worker])
        assert isinstance(report.error, OfferRejected)
        assert engine.transport.replay(2) is not None
        assert len(set(engine.buffers)) == 1


async def test_the_segment_waits_for_those_who_read_it_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        holder, other = Worker(), Worker()
        assert (await engine.refit(memory_sending(weights(1), weight_version=1), [other])).error is None
        replay = engine.transport.replay(1)
        assert replay is not None
        assert (await engine.refit(replay, [holder], release=False)).error is None
        await engine.transport.release(replay.offer.refit_id)
        assert (await engine.refit(memory_sending(weights(2), weight_version=2), [other])).error is None
        assert await asyncio.to_thread(holder.content) == {name: sha(t) for name, t in weights(1).items()}
        assert len(set(engine.buffers)) == 2
        await asyncio.to_thread(holder.release)


async def test_another_model_does_not_get_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        worker = Worker()
        masters = {name: t.float() if t.is_floating_point() else t for name, t in weights(1).items()}
        sending = memory_sending(masters, weight_version=1, cast="inventory")
        assert (await engine.refit(sending, [worker])).error is None
        replay = engine.transport.replay(1)
        assert replay is not None
        with pytest.raises(OfferRejected, match="another form"):
            await replay.send(Manifest(()), [])
