"""The publisher against a real link and transport, all in this process; threads, sockets and segments are real."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pitstop.engine.errors import (
    CheckpointUnreadable,
    DeadlineExceeded,
    DigestMismatch,
    DtypeMismatch,
    EngineClosed,
    InvalidRequest,
    LocalError,
    MissingTensors,
    OfferRejected,
    PeerLost,
    PitstopError,
    StaleVersion,
    UnsupportedPolicy,
    WorkerFailed,
    from_record,
)
from pitstop.engine.ports import NullObserver, Work
from pitstop.engine.refit import Outcome, RefitReport, route
from pitstop.transports import Publisher, PublishHandle, negotiation
from pitstop.transports.pool import WRITING
from pitstop.transports.sources import TensorSource
from tests.transports.children import Worker, descriptors, sha
from tests.transports.rig import Rig, rig, until
from tests.transports.weights import slow, weights


@asynccontextmanager
async def connected(engine: Rig, **options: Any) -> AsyncIterator[Publisher]:
    made = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address, **options))
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def settled(handle: PublishHandle, seconds: float = 20.0) -> RefitReport:
    async with asyncio.timeout(seconds):
        return await handle


def shas(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: sha(tensor) for name, tensor in tensors.items()}


async def test_a_handle_is_returned_at_once_and_can_be_awaited_waited_for_and_asked(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        assert trainer.weight_version == 3
        assert trainer.transport == "shared_memory"
        worker = Worker()
        handle = trainer.publish(weights(1), weight_version=1, deadlines={"resume": 3.0})
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        sending = await engine.offer()
        assert (sending.deadlines, sending.rebase) == ({"resume": 3.0}, False)
        assert handle.refit_id == sending.offer.refit_id
        impatient = asyncio.ensure_future(settled(handle, 0.01))
        with pytest.raises(TimeoutError):
            await impatient
        await engine.refit(sending, [worker], release=False)
        assert await asyncio.to_thread(worker.content) == shas(weights(1))
        report = await settled(handle)
        assert (report.outcome, report.nbytes) == (Outcome.COMMITTED, sending.offer.nbytes)
        assert report.replicas["r0"].seconds == {"receive": 0.25}
        assert handle.done()
        assert handle.sent.is_set()
        assert handle.result(0) is report
        assert await asyncio.to_thread(lambda: asyncio.run(settled(handle))) is report
        await engine.release(sending, [worker])


async def test_a_trainer_says_that_it_counts_anew(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        trainer.publish(weights(1), weight_version=1, rebase=True)
        assert (await engine.offer()).rebase


async def test_masters_are_cast_to_what_the_engine_has(tmp_path: Path) -> None:
    masters = {name: t.float() if t.is_floating_point() else t for name, t in weights(5).items()}
    masters["embed.weight"] = masters["embed.weight"].t().contiguous().t()
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        worker = Worker()
        plain = trainer.publish(masters, weight_version=1)
        with pytest.raises(DtypeMismatch, match='cast="inventory"') as caught:
            route((refused := await engine.offer()).offer, engine.model)
        await refused.settled(engine.report(refused, caught.value))
        with pytest.raises(DtypeMismatch):
            await settled(plain)
        handle = trainer.publish(masters, weight_version=1, cast="inventory")
        await engine.refit(await engine.offer(), [worker], release=False)
        expected = {n: t.to(weights(0)[n].dtype) for n, t in masters.items()}
        assert await asyncio.to_thread(worker.content) == shas(expected)
        assert (await settled(handle)).outcome is Outcome.COMMITTED
        await asyncio.to_thread(worker.release)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"weight_version": -1}, InvalidRequest, "weight_version"),
        ({"weight_version": True}, InvalidRequest, "weight_version"),
        ({"weight_version": 1.0}, InvalidRequest, "weight_version"),
        ({"cast": "bf16"}, UnsupportedPolicy, "cast"),
        ({"policy": "hope"}, UnsupportedPolicy, "hope"),
        ({"deadlines": {"never": 1.0}}, UnsupportedPolicy, "never"),
        ({"deadlines": {"suspend": 0.0}}, UnsupportedPolicy, "suspend"),
        ({"deadlines": {"silence": 0.5}}, UnsupportedPolicy, "beat every"),
        ({"what": {"a": torch.empty(1, device="meta")}}, OfferRejected, "a is on the meta device"),
        ({"what": "/nowhere"}, CheckpointUnreadable, "/nowhere"),
        ({"what": 3}, InvalidRequest, "int"),
    ],
)
async def test_mistakes_are_raised_where_they_are_made(
    tmp_path: Path, options: dict[str, Any], error: type[PitstopError], why: str
) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        arguments: dict[str, Any] = {"what": weights(1), "weight_version": 1} | options
        with pytest.raises(error, match=why):
            trainer.publish(arguments.pop("what"), **arguments)
        assert engine.offers.empty()


async def test_what_is_wrong_with_a_connection_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match=r"no answer .*no such socket: has the engine started"):
        await asyncio.to_thread(lambda: Publisher.connect(f"ipc://{tmp_path}/nobody.sock", timeout=0.2))
    for address in ("nonsense", "ipc://" + "x" * 200):
        with pytest.raises(LocalError, match="not an address"):
            Publisher.connect(address, timeout=0.2)
    monkeypatch.setattr(negotiation, "why_not", lambda path, nonce: "/proc/1/fd/2 cannot be opened: Permission denied")
    async with rig(tmp_path) as engine:
        with pytest.raises(LocalError, match=r"no transport .* shared_memory: .*Permission denied"):
            async with connected(engine):
                pass


async def test_an_offer_that_the_engine_will_not_hear_of_raises_its_reason(tmp_path: Path) -> None:
    def no(sending: object) -> None:
        raise StaleVersion("version 1 is not above 3")

    async with rig(tmp_path) as engine, connected(engine) as trainer:
        engine.link._on_offer = no
        handle = trainer.publish(weights(1), weight_version=1)
        with pytest.raises(StaleVersion, match="not above 3"):
            await settled(handle)
        assert handle.sent.is_set()


async def test_a_report_of_a_failed_refit_raises_its_error(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        handle = trainer.publish({"embed.weight": weights(1)["embed.weight"]}, weight_version=1)
        sending = await engine.offer()
        with pytest.raises(MissingTensors) as caught:
            route(sending.offer, engine.model)
        await sending.settled(engine.report(sending, caught.value))
        with pytest.raises(MissingTensors, match="7 tensors of the model are missing"):
            await settled(handle)


async def test_two_publishes_have_a_handle_each(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        first = trainer.publish(weights(1), weight_version=1)
        second = trainer.publish(weights(2), weight_version=2)
        displaced, sending = await engine.offer(), await engine.offer()
        report = engine.report(displaced, None)
        await displaced.settled(RefitReport(report.refit_id, 1, Outcome.SUPERSEDED, "shared_memory", 0, 0, 0.1, 0.0))
        assert (await settled(first)).outcome is Outcome.SUPERSEDED
        assert first.sent.is_set()
        worker = Worker()
        await engine.refit(sending, [worker], release=False)
        assert await asyncio.to_thread(worker.content) == shas(weights(2))
        assert (await settled(second)).outcome is Outcome.COMMITTED
        await asyncio.to_thread(worker.release)


async def test_a_source_that_fails_fails_its_refit_and_no_other(tmp_path: Path) -> None:
    class Broken(TensorSource):
        def pack(self, *arguments: Any) -> Iterator[int]:
            yield 0
            raise OSError("disk on fire")

    async with rig(tmp_path) as engine, connected(engine) as trainer:
        worker = Worker()
        handle = trainer.publish(Broken(weights(1).items()), weight_version=1)
        sending = await engine.offer()
        report = await engine.refit(sending, [worker])
        assert isinstance(report.error, WorkerFailed)
        with pytest.raises(WorkerFailed, match="disk on fire"):
            await settled(handle)
        again = trainer.publish(weights(2), weight_version=2)
        await engine.refit(await engine.offer(), [worker], release=False)
        assert await asyncio.to_thread(worker.content) == shas(weights(2))
        assert (await settled(again)).outcome is Outcome.COMMITTED
        # Everyone had let go of what the failed refit used.
        assert len(set(engine.buffers)) == 1
        await asyncio.to_thread(worker.release)


async def test_a_refit_that_is_given_up_stops_the_trainer(tmp_path: Path) -> None:
    begun = threading.Event()
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        handle = trainer.publish(slow(begun.set), weight_version=1)
        sending = await engine.offer()
        tickets = await engine.plan(sending, [])
        assert list(tickets) == []
        tickets = await engine.plan(sending, [Worker()])
        sends = asyncio.ensure_future(sending.send(route(sending.offer, engine.model), tickets))
        assert await asyncio.to_thread(begun.wait, 10)
        assert sending.offer.refit_id in WRITING
        sends.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sends
        assert await asyncio.to_thread(handle.sent.wait, 10)
        await until(lambda: sending.offer.refit_id not in WRITING)
        await engine.release(sending, [])
        await sending.settled(engine.report(sending, PeerLost("given up")))
        with pytest.raises(PeerLost, match="given up"):
            await settled(handle)


async def test_a_trainer_that_is_too_slow_is_given_up(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        engine.limits = (0.5, 5.0)
        handle = trainer.publish(slow(lambda: None), weight_version=1)
        sending = await engine.offer()
        report = await engine.refit(sending, [Worker()])
        assert isinstance(report.error, DeadlineExceeded)
        assert report.error.fields["phase"] == "send"
        with pytest.raises(DeadlineExceeded):
            await settled(handle)


async def test_closing_the_publisher_ends_what_is_open_on_both_sides(tmp_path: Path) -> None:
    begun = threading.Event()
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        handle = trainer.publish(slow(begun.set), weight_version=1)
        waiting = trainer.publish(weights(2), weight_version=2)
        sending, other = await engine.offer(), await engine.offer()
        tickets = await engine.plan(sending, [Worker()])
        sends = asyncio.ensure_future(sending.send(route(sending.offer, engine.model), tickets))
        assert await asyncio.to_thread(begun.wait, 10)
        await asyncio.to_thread(trainer.close)
        for ended in (handle, waiting):
            with pytest.raises(EngineClosed):
                ended.result(0)
            assert ended.sent.is_set()
        async with asyncio.timeout(5):
            with pytest.raises(PitstopError):
                await sends
            with pytest.raises(PeerLost, match="closed its link"):
                await other.send(route(other.offer, engine.model), tickets)
        with pytest.raises(EngineClosed):
            trainer.publish(weights(3), weight_version=3)
        await asyncio.to_thread(trainer.close)
        assert not {sending.offer.refit_id, other.offer.refit_id} & WRITING


async def test_an_engine_that_closes_ends_what_is_open(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        trainer = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        handle = trainer.publish(weights(1), weight_version=1)
        await engine.offer()
    with pytest.raises(PeerLost):
        await settled(handle, 3)
    with pytest.raises(PeerLost):
        trainer.publish(weights(2), weight_version=2)
    await asyncio.to_thread(trainer.close)


async def test_a_publisher_is_not_used_across_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(LocalError, match="before a fork"):
            trainer.publish(weights(1), weight_version=1)
        monkeypatch.undo()


async def test_a_transport_without_a_link_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        trainer.publish(weights(1), weight_version=1)
        sending = await engine.offer()
    engine.limits = (1.0, 0.1)
    with pytest.raises(EngineClosed):
        await engine.plan(sending, [Worker()])


async def test_a_send_is_observed_and_is_the_refits_parent(tmp_path: Path) -> None:
    class Recorder(NullObserver):
        def __init__(self) -> None:
            self.works: list[Work] = []
            self.ended: list[tuple[str, str | None]] = []

        def opened(self, work: Work) -> Mapping[str, str]:
            self.works.append(work)
            return {"traceparent": "00-send"}

        def closed(self, key: str, at: int, error: str | None = None, detail: object = None) -> None:
            self.ended.append((key, error))

    recorder = Recorder()
    async with rig(tmp_path) as engine, connected(engine, observer=recorder) as trainer:
        worker = Worker()
        handle = trainer.publish(weights(1), weight_version=1, headers={"traceparent": "00-caller"})
        sending = await engine.offer()
        assert sending.offer.headers == {"traceparent": "00-send"}
        await engine.refit(sending, [worker])
        await settled(handle)
        failed = trainer.publish(weights(2), weight_version=2)
        sending = await engine.offer()
        await sending.settled(engine.report(sending, StaleVersion("too old")))
        with pytest.raises(StaleVersion):
            await settled(failed)
    work = recorder.works[0]
    assert (work.kind, work.key) == ("send_weights", f"send_weights:{handle.refit_id}")
    assert work.headers == {"traceparent": "00-caller"}
    assert work.detail["transport"] == "shared_memory"
    assert recorder.ended == [(work.key, None), (f"send_weights:{failed.refit_id}", "stale_version")]


# -- what the segment may not do -----------------------------------------------------------------------------


async def test_a_byte_that_changes_after_it_was_sent_is_found_and_the_tensor_named(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        worker = Worker()
        handle = trainer.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        tickets = await engine.plan(sending, [worker])
        worker.receive(tickets[0])
        trailer = await sending.send(route(sending.offer, engine.model), tickets)
        place = next(p for p in tickets[0].tensors if p.spec.name == "layer.weight")
        fd = os.open(tickets[0].buffer, os.O_RDWR)
        byte = os.pread(fd, 1, place.offset + 777)
        os.pwrite(fd, bytes([byte[0] ^ 1]), place.offset + 777)
        os.close(fd)
        await engine.transport.seal(trailer)
        (over,) = await engine.ended(sending.offer.refit_id, 1)
        assert over.error is not None
        error = from_record(over.error)
        assert isinstance(error, DigestMismatch)
        assert error.fields == {"tensor": "layer.weight", "count": 1, "replica": "r0", "rank": 0}
        assert worker.sink.bucket is None
        await engine.release(sending, [worker])
        await sending.settled(engine.report(sending, error))
        with pytest.raises(DigestMismatch, match=r"layer\.weight"):
            await settled(handle)


async def test_a_loader_that_writes_into_what_it_was_given_spoils_no_later_refit(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        worker = Worker()
        for version in (1, 2, 3):
            handle = trainer.publish(weights(version), weight_version=version)
            sending = await engine.offer()
            report = await engine.refit(sending, [worker], release=False)
            assert report.error is None
            assert await asyncio.to_thread(worker.content) == shas(weights(version))
            worker.scribble()
            await engine.release(sending, [worker])
            await settled(handle)
        assert len(set(engine.buffers)) == 1


async def test_a_refit_that_was_not_released_keeps_its_segment(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        holder, other = Worker(), Worker()
        trainer.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        await engine.refit(sending, [holder], release=False)
        await engine.transport.release(sending.offer.refit_id)
        before = await asyncio.to_thread(holder.content)
        trainer.publish(weights(2), weight_version=2)
        again = await engine.offer()
        await engine.refit(again, [other], release=False)
        assert len(set(engine.buffers)) == 2
        assert await asyncio.to_thread(holder.content) == before == shas(weights(1))
        assert await asyncio.to_thread(other.content) == shas(weights(2))
        for worker in (holder, other):
            await asyncio.to_thread(worker.release)


async def test_no_refit_leaves_descriptors_behind(tmp_path: Path) -> None:
    async def refits(count: int) -> None:
        async with rig(tmp_path) as engine, connected(engine) as trainer:
            for version in range(count):
                worker = Worker()
                handle = trainer.publish(weights(version), weight_version=version)
                await engine.refit(await engine.offer(), [worker])
                await settled(handle)

    # Mappings of the last segment stay, for the next refit, and so do their descriptors: Python duplicates them.
    await refits(1)
    before = descriptors()
    await refits(4)
    assert descriptors() == before
    assert not os.listdir(tmp_path)
