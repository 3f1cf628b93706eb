"""An engine as far as transports need one: a link, a transport, and the coordinator's order of calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pitstop.engine.errors import PitstopError, from_record
from pitstop.engine.ports import Sending
from pitstop.engine.refit import Outcome, RefitReport, ReplicaReport, route
from pitstop.engine.worker_ports import Inventory, Mode, Progress, Ticket, WorkerLayout
from pitstop.transports.control import ControlLink
from pitstop.transports.remote import RemoteSending
from pitstop.transports.room import Buffers
from pitstop.transports.shared_memory import SharedMemoryTransport
from tests.transports.children import Child, Worker
from tests.transports.lent import layout
from tests.transports.weights import inventory, weights


@dataclass
class Rig:
    link: ControlLink
    transport: SharedMemoryTransport
    offers: asyncio.Queue[RemoteSending]
    model: Inventory
    limits: tuple[float, float] = (30.0, 5.0)
    progress: list[Progress] = field(default_factory=list)
    mode: Mode = "auto"
    buffers: list[int] = field(default_factory=list)  # inodes of the segments used
    spare: int | None = None  # memory of the GPU that `lent` makes believe in; None: receivers are on none

    async def offer(self) -> RemoteSending:
        async with asyncio.timeout(30):
            return await self.offers.get()

    async def plan(self, sending: Sending, workers: Sequence[Child | Worker]) -> Sequence[Ticket]:
        manifest = route(sending.offer, self.model)
        layouts = [WorkerLayout("r0", 1, n, len(workers), w.pid, "cpu") for n, w in enumerate(workers)]
        if self.spare is not None:
            layouts = [layout(n, len(workers), w.pid, self.spare) for n, w in enumerate(workers)]
        tickets = await self.transport.plan(sending.offer, manifest, layouts, self.limits, self.mode)
        self.buffers += [os.stat(ticket.buffer).st_ino for ticket in tickets[:1] if ticket.buffer]
        return tickets

    async def refit(self, sending: Sending, workers: Sequence[Child | Worker], *, release: bool = True) -> RefitReport:
        """One refit as the coordinator runs it; every worker lands or the report says why not."""
        error: PitstopError | None = None
        try:
            tickets = await self.plan(sending, workers)
            for worker, ticket in zip(workers, tickets, strict=True):
                await asyncio.to_thread(worker.receive, ticket)
            watch = asyncio.create_task(self.ended(sending.offer.refit_id, len(workers)))
            ring = self.transport.ring(sending.offer.refit_id)
            if ring is not None:
                await until(lambda: self.here(sending.offer.refit_id) == len(workers))
            trailer = await sending.send(route(sending.offer, self.model), tickets, ring)
            await self.transport.seal(trailer)
            for progress in await watch:
                if progress.error is not None:
                    raise from_record(progress.error)
        except PitstopError as failure:
            error = failure
            await self.transport.abort(sending.offer.refit_id, failure)
        if release:
            await self.release(sending, workers)
        report = self.report(sending, error)
        await sending.settled(report)
        return report

    async def ended(self, refit_id: str, count: int) -> list[Progress]:
        """Wait until `count` receivers have landed or failed."""
        over: list[Progress] = []
        async with asyncio.timeout(40):
            async for progress in self.transport.watch(refit_id):
                self.progress.append(progress)
                if progress.kind != "attached":
                    over.append(progress)
                if len(over) == count:
                    break
        return over

    def here(self, refit_id: str) -> int:
        """How many receivers of a refit have come."""
        return len({p.rank for p in self.progress if p.refit_id == refit_id})

    async def release(self, sending: Sending, workers: Sequence[Child | Worker]) -> None:
        for worker in workers:
            if worker.alive():
                await asyncio.to_thread(worker.ask, "release")
        await self.transport.release(sending.offer.refit_id)

    def report(self, sending: Sending, error: PitstopError | None) -> RefitReport:
        offer = sending.offer
        how = Outcome.COMMITTED if error is None else Outcome.FAILED
        parts = {"r0": ReplicaReport("r0", error is None, {"receive": 0.25}, 2, 0.1, error)}
        return RefitReport(
            offer.refit_id, offer.weight_version, how, "shared_memory", offer.nbytes, len(offer.tensors), 1.5, 0.5,
            parts, error,
        )  # fmt: skip


@asynccontextmanager
async def rig(
    folder: Path,
    model: Inventory | None = None,
    *,
    listen: str | None = None,
    buffers: Buffers | None = None,
    mode: Mode = "auto",
) -> AsyncIterator[Rig]:
    offers: asyncio.Queue[RemoteSending] = asyncio.Queue()
    link = ControlLink(
        f"ipc://{folder}/control.sock", run_id="run-1", on_offer=offers.put_nowait, weight_version=lambda: 3,
        listen=listen,
    )  # fmt: skip
    made = Rig(link, SharedMemoryTransport(link, buffers), offers, model or inventory(weights(0)), mode=mode)
    task = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(10):
            await link.ready()
        yield made
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=10)


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something holds; a generous limit, for machines that are busy."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
