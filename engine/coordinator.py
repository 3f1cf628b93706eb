"""The fleet's refit coordinator: one task that judges offers, keeps one pending version, runs one refit at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio.to_thread

from pitstop.engine.errors import NotServing, PitstopError, RemoteError, StaleVersion
from pitstop.engine.handle import RefitHandle
from pitstop.engine.ledger import Ledger
from pitstop.engine.ports import Observer, Sending, Transport
from pitstop.engine.refit import Outcome, RefitOptions, RefitReport, route
from pitstop.engine.replica import Replica
from pitstop.engine.run import RefitRun
from pitstop.engine.worker_ports import Inventory


@dataclass(slots=True)
class _Asked:
    handle: RefitHandle
    make: Callable[[], Awaitable[Sending]]
    options: RefitOptions


class Coordinator:
    """Latest wins: a newer acceptable offer takes the place of the pending one, and of the running one until its
    first replica begins to suspend. An offer that does not fit displaces nothing.
    """

    def __init__(self, replicas: Sequence[Replica], ledger: Ledger, transport: Transport, observer: Observer) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._transport = transport
        self._observer = observer
        self._inbox: asyncio.Queue[_Asked] = asyncio.Queue()
        self._running: tuple[RefitRun, asyncio.Task[None]] | None = None
        self._pending: RefitRun | None = None
        self._known: dict[int, tuple[int, ...]] = {}
        self._newest: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a refit runs, waits, or is being judged."""
        return self._running is not None or self._pending is not None or not self._inbox.empty()

    @property
    def newest(self) -> int | None:
        """The newest version any replica has committed."""
        versions = [r.weight_version for r in self._replicas if r.weight_version is not None]
        self._newest = max([*versions, *([self._newest] if self._newest is not None else [])], default=None)
        return self._newest

    def offer(self, handle: RefitHandle, make: Callable[[], Awaitable[Sending]], options: RefitOptions) -> None:
        """Take an offer; `make` gives its far end, and may read files in a thread."""
        self._inbox.put_nowait(_Asked(handle, make, options))

    def changed(self) -> None:
        """A replica changed phase."""
        if self._running is not None:
            self._running[0].changed()

    async def run(self) -> None:
        """Judge offers until cancelled."""
        try:
            while True:
                await self._judge(await self._inbox.get())
        finally:
            if self._running is not None:
                self._running[1].cancel()
                await asyncio.wait({self._running[1]}, timeout=10)
            while not self._inbox.empty():
                self._refuse(self._inbox.get_nowait().handle, NotServing("the engine was closed"))

    async def _judge(self, asked: _Asked) -> None:
        sending: Sending | None = None
        try:
            sending = await asked.make()
            run = await self._accept(asked, sending)
        except Exception as failure:  # noqa: BLE001 - goes to whoever asked, as the error it is
            error = failure if isinstance(failure, PitstopError) else RemoteError(f"the offer failed: {failure!r}")
            report = self._refuse(asked.handle, error)
            if sending is not None:
                await sending.settled(report)
            return
        if self._pending is not None:
            self._pending.supersede(run.weight_version)
            await self._pending.displaced()
        self._pending = run
        if self._running is None:
            self._next()
        else:
            self._running[0].supersede(run.weight_version)

    async def _accept(self, asked: _Asked, sending: Sending) -> RefitRun:
        offer = sending.offer
        self._check_version(offer.weight_version)
        manifest = await anyio.to_thread.run_sync(route, offer, self._inventory())
        return RefitRun(asked.handle, sending, manifest, asked.options, self._transport, self._observer, self._known)

    def _check_version(self, version: int) -> None:
        runs = (self._pending, self._running[0] if self._running else None)
        ahead = [run.weight_version for run in runs if run is not None and not run.handle.done()]
        if ahead and version <= max(ahead):
            raise StaleVersion(f"version {version} is not above {max(ahead)}, which is on its way")
        newest = self.newest
        if newest is None or version > newest:
            return
        if version == newest and any(r.weight_version != newest for r in self._replicas):
            return
        raise StaleVersion(f"version {version} is not above {newest}, which the fleet has committed")

    def _inventory(self) -> Inventory:
        for replica in self._replicas:
            if replica.booted is not None:
                return replica.booted.inventory
        raise NotServing("no replica has booted, so the model's tensors are not known")

    def _next(self) -> None:
        run, self._pending = self._pending, None
        if run is None:
            return
        task = asyncio.create_task(run.run(self._replicas, self.newest), name=f"refit:{run.weight_version}")
        self._running = (run, task)
        task.add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._running = None
        self._next()

    @staticmethod
    def _refuse(handle: RefitHandle, error: PitstopError) -> RefitReport:
        report = RefitReport(
            handle.refit_id, handle.weight_version, Outcome.FAILED, "none", 0, 0, 0.0, 0.0, error=error
        )
        handle.end(report)
        return report
