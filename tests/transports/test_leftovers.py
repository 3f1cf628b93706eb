"""What is over leaves nothing behind: no client, no descriptor, no lease, no mapping, no thread."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pitstop.transports import Publisher, control
from pitstop.transports.memory_link import memory_sending
from tests.transports.children import Worker, descriptors
from tests.transports.rig import Rig, rig, until
from tests.transports.weights import weights


async def refits(engine: Rig, count: int, worker: Worker) -> None:
    for version in range(count):
        report = await engine.refit(memory_sending(weights(version), weight_version=version), [worker])
        assert report.error is None


async def test_a_receiver_that_has_let_go_is_forgotten_with_its_descriptor(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        await refits(engine, 1, Worker())
        await until(lambda: not engine.link._clients, 2.0)
        before = descriptors()
        await refits(engine, 5, Worker())
        await until(lambda: not engine.link._clients, 2.0)
        assert descriptors() == before
        assert engine.link.violations == 0


async def test_a_receiver_that_fails_and_holds_nothing_is_forgotten(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        engine.limits = (0.5, 5.0)
        worker = Worker()
        sending = memory_sending(weights(1), weight_version=1)
        (ticket,) = await engine.plan(sending, [worker])
        worker.receive(ticket)
        (over,) = await engine.ended(sending.offer.refit_id, 1)
        assert over.kind == "failed"
        await until(lambda: not engine.link._clients, 2.0)
        await engine.release(sending, [worker])
        assert engine.link.violations == 0


async def test_trainers_that_fill_the_link_keep_no_receiver_out(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await Publisher.connect_async(engine.link.address)
        most, control._MOST_CLIENTS = control._MOST_CLIENTS, 1  # type: ignore[misc]
        try:
            await refits(engine, 1, Worker())
        finally:
            control._MOST_CLIENTS = most  # type: ignore[misc]
        await asyncio.to_thread(trainer.close)
