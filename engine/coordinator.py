"""The fleet's refit coordinator: one task that judges offers, keeps one pending version, runs one refit at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

from pitstop.engine.errors import EngineClosed, NotServing, OfferRejected, PitstopError, RemoteError, StaleVersion
from pitstop.engine.handle import RefitHandle
from pitstop.engine.job import bounded
from pitstop.engine.ledger import Ledger, Place
from pitstop.engine.ports import Observer, Sending, Transport
from pitstop.engine.refit import Content, Outcome, RefitOptions, RefitReport, route
from pitstop.engine.replica import Replica
from pitstop.engine.run import RefitRun
from pitstop.engine.worker_ports import Inventory

Make = Callable[[], Coroutine[Any, Any, Sending]]


@dataclass(frozen=True, slots=True)
class Delivery:
    """Something that a replica can be refitted from.

    `same`: its content is known to be what was committed as that version.
    """

    refit_id: str
    weight_version: int
    make: Make
    rebase: bool = False
    same: bool = False


Again = Callable[[], Delivery]
"""Gives what was offered once more, from something that lasts: a checkpoint."""


@dataclass(slots=True)
class _Asked:
    handle: RefitHandle
    make: Make
    options: RefitOptions
    same: bool
    again: Again | None


class Coordinator:
    """Latest wins: a newer acceptable offer takes the place of the pending one, and of the running one until its
    first replica begins to suspend. An offer that does not fit displaces nothing.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        ledger: Ledger,
        transport: Transport,
        observer: Observer,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._transport = transport
        self._observer = observer
        self._idle = idle
        self._closed = False
        self._judged: _Asked | None = None
        self._inbox: asyncio.Queue[_Asked] = asyncio.Queue()
        self._running: tuple[RefitRun, asyncio.Task[None]] | None = None
        self._pending: RefitRun | None = None
        self._known: dict[Place, Content] = {}
        self._moved = asyncio.Event()
        self.sealed: Place | None = None
        """What was last sent and sealed, whatever became of it."""
        self.lasting: tuple[Place, Again] | None = None
        """The newest version, if it came from something that lasts."""
        self._agains: WeakKeyDictionary[RefitRun, Again] = WeakKeyDictionary()

    @property
    def busy(self) -> bool:
        """Whether a refit runs, waits, or is being judged."""
        waiting = self._pending is not None or self._judged is not None or not self._inbox.empty()
        return waiting or self._running is not None

    async def moved(self) -> None:
        """Return when a refit has ended.

        Raises:
            EngineClosed: none will be begun again. (Returning at once would have who waits in a loop stop the loop.)
        """
        if self._closed:
            raise EngineClosed("the engine was closed")
        await self._moved.wait()

    def offer(
        self, handle: RefitHandle, make: Make, options: RefitOptions, *, same: bool = False, again: Again | None = None
    ) -> None:
        """Take an offer; `make` gives its far end, and may read files in a thread it does not wait for.

        `same`: its content is known to be what was committed as that version, though no digests say so.
        """
        if self._closed:
            self._refuse(handle, EngineClosed("the engine was closed"))
            return
        self._inbox.put_nowait(_Asked(handle, make, options, same, again))

    def changed(self) -> None:
        """A replica changed phase."""
        if self._running is not None:
            self._running[0].changed()

    async def run(self) -> None:
        """Judge offers until cancelled."""
        try:
            while True:
                self._judged = await self._inbox.get()
                await self._judge(self._judged)
                self._judged = None
                if not self.busy:
                    self._rest()
        finally:
            self.close()
            left = [] if self._judged is None else [self._judged.handle]
            while not self._inbox.empty():
                left.append(self._inbox.get_nowait().handle)
            left += [run.handle for run in (self._pending, self._running and self._running[0]) if run]
            if self._running is not None:
                task = self._running[1]
                task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({task}, timeout=10)
            for handle in left:
                if not handle.done():
                    self._refuse(handle, EngineClosed("the engine was closed before the refit had ended"))

    def close(self) -> None:
        """Begin nothing any more. Idempotent."""
        self._closed = True
        self._moved.set()

    def _rest(self) -> None:
        self._say_moved()
        self._idle()

    def _say_moved(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _judge(self, asked: _Asked) -> None:
        sending: Sending | None = None
        try:
            limit = asked.options.deadlines.receive
            sending = await bounded(asked.make(), limit, replica="fleet", phase="offer", peer="source")
            run = await self._accept(asked, sending)
        except Exception as failure:  # noqa: BLE001 - goes to whoever asked, as the error it is
            error = failure if isinstance(failure, PitstopError) else RemoteError(f"the offer failed: {failure!r}")
            report = self._refuse(asked.handle, error)
            if sending is not None:
                limit = asked.options.deadlines.control
                with contextlib.suppress(PitstopError):
                    await bounded(sending.settled(report), limit, replica="fleet", phase="settle")
            return
        if asked.again is not None:
            self._agains[run] = asked.again
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
        place = self._place(offer.weight_version, rebase=asked.options.rebase)
        if place == self._ledger.newest and place not in self._known and not asked.same:
            # Replicas have it from a checkpoint that nobody digested: other content could not be told from it.
            raise OfferRejected(
                f"version {place.weight_version} was loaded at launch, and nothing tells whether this is the same: "
                "recover() brings replicas back to it, refits need a version above it",
                weight_version=place.weight_version,
            )
        inventory = self._inventory()
        manifest = await anyio.to_thread.run_sync(route, offer, inventory)
        return RefitRun(
            asked.handle, sending, manifest, asked.options, self._transport, self._observer, self._known, place,
            inventory.tied,
        )  # fmt: skip

    def _place(self, version: int, *, rebase: bool) -> Place:
        runs = (self._pending, self._running[0] if self._running else None)
        ahead = max((run.place for run in runs if run is not None and not run.handle.done()), default=None)
        newest = self._ledger.newest
        top = max((place for place in (ahead, newest) if place is not None), default=None)
        if top is None:
            return Place.first(version)
        if rebase:
            return top.rebased(version)
        # A rebase that is on its way counts already: what follows it follows its count.
        place = top.later(version)
        if ahead is not None and place <= ahead:
            raise _stale(version, f"{ahead.weight_version}, which is on its way")
        if newest is None or place > newest:
            return place
        if place == newest and any(r.place != newest for r in self._replicas):
            return place
        raise _stale(version, f"{newest.weight_version}, which the fleet has committed")

    def _inventory(self) -> Inventory:
        for replica in self._replicas:
            if replica.booted is not None:
                return replica.booted.inventory
        raise NotServing("no replica has booted, so the model's tensors are not known")

    def _next(self) -> None:
        run, self._pending = self._pending, None
        if run is None:
            return
        newest = self._ledger.newest
        previous = newest.weight_version if newest is not None else None
        task = asyncio.create_task(run.run(self._replicas, previous), name=f"refit:{run.weight_version}")
        self._running = (run, task)
        task.add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        run, self._running = self._running and self._running[0], None
        if run is not None and run.content is not None:
            self.sealed = run.place
            if self._ledger.newest == run.place:
                if run.place not in self._known:
                    # A replica has held it for a moment at least, even if it was lost before it served.
                    self._known.clear()
                    self._known[run.place] = run.content
                again = self._agains.get(run)
                if again is not None:
                    self.lasting = run.place, again
                elif self.lasting is not None and self.lasting[0] != run.place:
                    self.lasting = None
        if not self._closed:
            self._next()
            self._say_moved()
            if not self.busy:
                self._idle()

    @staticmethod
    def _refuse(handle: RefitHandle, error: PitstopError) -> RefitReport:
        report = RefitReport(
            handle.refit_id, handle.weight_version, Outcome.FAILED, "none", 0, 0, 0.0, 0.0, error=error
        )
        handle.end(report)
        return report


def _stale(version: int, than: str) -> StaleVersion:
    return StaleVersion(
        f"version {version} is not above {than}; a trainer that counts anew says so, once, with rebase=True",
        weight_version=version,
    )
