"""Processes that die, freeze or never come: noticed in time, named, and nothing hangs. Limits are generous."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pitstop.engine.errors import PeerLost, from_record
from pitstop.engine.refit import Outcome, route
from pitstop.transports import Publisher
from pitstop.transports.pool import WRITING
from tests.transports.children import Worker, child, crawl, leave, sha, work
from tests.transports.rig import rig, until
from tests.transports.weights import slow, weights

SLACK = 4.0
"""What a busy machine may take on top of a limit."""
SILENCE = 2.5
"""Seconds that anybody may say nothing: in them a healthy peer on a busy machine beats."""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_trainer_that_dies_or_freezes_while_sending_is_lost_in_time(
    tmp_path: Path, how: signal.Signals
) -> None:
    async with rig(tmp_path) as engine:
        engine.limits = (30.0, SILENCE)
        worker = Worker()
        with child(crawl, engine.link.address, {}) as trainer:
            sending = await engine.offer()
            refit = asyncio.ensure_future(engine.refit(sending, [worker]))
            assert await asyncio.to_thread(trainer.answer) == "sending"
            os.kill(trainer.pid, how)
            began = time.monotonic()
            report = await refit
            took = time.monotonic() - began
            assert isinstance(report.error, PeerLost)
            assert str(trainer.pid) in str(report.error)
            assert took < SILENCE + SLACK
            # A frozen trainer may write again one day; a dead one cannot.
            assert (sending.offer.refit_id in WRITING) is (how is signal.SIGSTOP)
            # The engine lives on: the next refit works, and a frozen trainer keeps its segment to itself.
            other = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
            handle = other.publish(weights(2), weight_version=2)
            await engine.refit(await engine.offer(), [worker], release=False)
            expected = {name: sha(tensor) for name, tensor in weights(2).items()}
            assert await asyncio.to_thread(worker.content) == expected
            assert (await asyncio.to_thread(handle.result, 10)).outcome is Outcome.COMMITTED
            await asyncio.to_thread(worker.release)
            await asyncio.to_thread(other.close)
            assert (len(set(engine.buffers)) == 1) is (how is signal.SIGKILL)
            if how is signal.SIGSTOP:
                os.kill(trainer.pid, signal.SIGCONT)
                assert await asyncio.to_thread(trainer.answer) == "peer_lost"
                await until(lambda: sending.offer.refit_id not in WRITING)


async def test_a_trainer_that_dies_before_it_is_asked_to_send_is_lost(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        with child(crawl, engine.link.address, {}) as trainer:
            sending = await engine.offer()
            os.kill(trainer.pid, signal.SIGKILL)
            await until(lambda: not engine.link._clients)
            worker = Worker()
            with pytest.raises(PeerLost):
                await sending.send(route(sending.offer, engine.model), await engine.plan(sending, [worker]))


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("exception", 3)])
async def test_a_trainer_that_ends_without_closing_ends_at_once_and_is_lost(
    tmp_path: Path, how: str, code: int
) -> None:
    async with rig(tmp_path) as engine:
        with child(leave, engine.link.address, how) as trainer:
            report = await engine.refit(await engine.offer(), [Worker()])
            assert isinstance(report.error, PeerLost)
            await asyncio.to_thread(trainer.process.join, 10)
            assert trainer.process.exitcode == code


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_receiver_that_dies_or_freezes_is_reported_and_the_others_land(
    tmp_path: Path, how: signal.Signals
) -> None:
    async with rig(tmp_path) as engine:
        engine.limits = (30.0, SILENCE)
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        well = Worker()
        with child(work) as struck:
            publisher.publish(weights(1), weight_version=1)
            sending = await engine.offer()
            tickets = await engine.plan(sending, [struck, well])
            await asyncio.to_thread(struck.receive, tickets[0])
            well.receive(tickets[1])
            trailer = await sending.send(route(sending.offer, engine.model), tickets)
            await until(lambda: len(engine.link._clients) == 3)
            os.kill(struck.pid, how)
            began = time.monotonic()
            lost = await engine.ended(sending.offer.refit_id, 1)
            assert time.monotonic() - began < SILENCE + SLACK
            assert (lost[0].kind, lost[0].rank) == ("failed", 0)
            assert lost[0].error is not None
            error = from_record(lost[0].error)
            assert isinstance(error, PeerLost)
            assert error.fields["replica"] == "r0"
            await engine.transport.seal(trailer)
            (landed,) = await engine.ended(sending.offer.refit_id, 1)
            assert (landed.kind, landed.rank) == ("landed", 1), landed.error
            await asyncio.to_thread(well.release)
            await engine.transport.release(sending.offer.refit_id)
            # The dead have let go; the frozen may look again.
            publisher.publish(weights(2), weight_version=2)
            again = await engine.offer()
            assert (await engine.refit(again, [well])).error is None
            assert (len(set(engine.buffers)) == 1) is (how is signal.SIGKILL)
        await asyncio.to_thread(publisher.close)


async def test_a_receiver_that_never_comes_is_reported(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        engine.limits = (30.0, 0.5)
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        publisher.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        tickets = await engine.plan(sending, [Worker()])
        await engine.transport.seal(await sending.send(route(sending.offer, engine.model), tickets))
        (over,) = await engine.ended(sending.offer.refit_id, 1)
        assert over.error is not None
        assert over.error.slug == "peer_lost"
        # Nobody was ever let in, and nobody will be: the segment is as good as new.
        await engine.transport.release(sending.offer.refit_id)
        worker = Worker()
        publisher.publish(weights(2), weight_version=2)
        assert (await engine.refit(await engine.offer(), [worker])).error is None
        assert len(set(engine.buffers)) == 1
        await asyncio.to_thread(publisher.close)


async def test_an_aborted_refit_ends_its_receivers(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        publisher.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        early, late = Worker(), Worker()
        tickets = await engine.plan(sending, [early, late])
        early.receive(tickets[0])
        for _ in range(2):
            await engine.transport.abort(sending.offer.refit_id, PeerLost("the trainer is gone", peer="trainer"))
        late.receive(tickets[1])
        for over in await engine.ended(sending.offer.refit_id, 2):
            assert over.error is not None
            assert over.error.message == "the trainer is gone"
        assert early.sink.bucket is late.sink.bucket is None
        await engine.release(sending, [])
        await asyncio.to_thread(publisher.close)


async def test_a_receiver_can_be_aborted_by_its_worker(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        publisher.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        worker = Worker()
        (ticket,) = await engine.plan(sending, [worker])
        worker.receive(ticket)
        await until(lambda: len(engine.link._clients) == 2)
        await asyncio.to_thread(worker.release)
        (over,) = await engine.ended(sending.offer.refit_id, 1)
        assert over.error is not None
        assert "told to give this refit up" in over.error.message
        await asyncio.to_thread(publisher.close)


def serve(connection: Connection, folder: str) -> None:
    """An engine process that takes an offer and has it sent."""

    async def main() -> None:
        async with rig(Path(folder)) as engine:
            connection.send(engine.link.address)
            sending = await engine.offer()
            tickets = await engine.plan(sending, [Worker()])
            connection.send("sending")
            await sending.send(route(sending.offer, engine.model), tickets)

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_freezes_is_lost_in_time(tmp_path: Path, how: signal.Signals) -> None:
    with child(serve, str(tmp_path)) as engine:
        with Publisher.connect(engine.answer()) as publisher:
            handle = publisher.publish(slow(lambda: None), weight_version=1, deadlines={"silence": SILENCE})
            assert engine.answer() == "sending"
            os.kill(engine.pid, how)
            began = time.monotonic()
            with pytest.raises(PeerLost):
                handle.result(20)
            assert time.monotonic() - began < SILENCE + SLACK
            assert handle.sent.is_set()
            began = time.monotonic()
        assert time.monotonic() - began < SILENCE + SLACK
