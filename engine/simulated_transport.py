"""A transport and a trainer for simulated engines: a version is a number, and a bucket of the ring one tensor."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal
from uuid import uuid4
from zlib import crc32

from pitstop.engine.errors import DigestMismatch, PitstopError, RemoteError, ReplicaDied
from pitstop.engine.refit import RefitReport
from pitstop.engine.worker_ports import (
    Manifest,
    Mode,
    Offer,
    Progress,
    ProgressKind,
    Ticket,
    Trailer,
    WorkerLayout,
)

if TYPE_CHECKING:
    from pitstop.engine.ports import Ring
    from pitstop.engine.simulated import SimulatedBackend

Fault = Literal["raise", "hang", "die", "lie"]


@dataclass(slots=True)
class Script:
    """Faults to come: for each call name, what its next calls do (None: nothing special).

    Of a backend: start, submit, suspend, resume, reset_cache, sleep, wake, receive, load, apply, finalize, undo,
    release. `load` is called once a tensor received in place, before it is written; "lie" writes another version.
    Of a transport: attach, land. Of a sending: send, and `fill` once a bucket of a ring.
    """

    faults: defaultdict[str, deque[Fault | None]] = field(default_factory=lambda: defaultdict(deque))

    def plan(self, name: str, *faults: Fault | None) -> None:
        """Add faults for the next calls of `name`."""
        self.faults[name].extend(faults)

    def next(self, name: str) -> Fault | None:
        """Take the next fault of `name`."""
        return self.faults[name].popleft() if self.faults[name] else None

    async def strike(self, name: str) -> None:
        """Raise or hang if the next call of `name` does."""
        fault = self.next(name)
        if fault == "raise":
            raise RemoteError(f"scripted: {name}")
        if fault is not None:
            await asyncio.Event().wait()


class SimulatedRing:
    """Implements `Ring`. A reader is a ticket; one that takes longer than `patience` over a bucket counts no more."""

    def __init__(self, patience: float) -> None:
        self.drained = 0
        self._patience = patience
        self._buckets = 0
        self._readers: dict[tuple[str, int], int] = {}
        self._moved = asyncio.Event()
        self._calls: list[Callable[[int], object]] = []

    def lent(self, handle: bytes, nbytes: int) -> None:
        """See `Ring.lent`."""

    def filled(self, buckets: int) -> None:
        """See `Ring.filled`."""
        self._buckets = buckets
        self._moved.set()
        self._moved = asyncio.Event()
        self._drain()
        asyncio.get_running_loop().call_later(self._patience, self._evict, buckets)

    def on_drained(self, call: Callable[[int], object]) -> None:
        """See `Ring.on_drained`."""
        self._calls.append(call)

    def joined(self, ticket: Ticket) -> None:
        """A reader begins."""
        self._readers[ticket.replica, ticket.rank] = 0

    async def bucket(self, ticket: Ticket, n: int) -> None:
        """Wait until bucket `n` is filled; its reader is done with those before."""
        if (ticket.replica, ticket.rank) in self._readers:
            self._readers[ticket.replica, ticket.rank] = n
        self._drain()
        while self._buckets <= n:
            await self._moved.wait()

    def left(self, ticket: Ticket) -> None:
        """A reader has read everything, or counts no longer."""
        self._readers.pop((ticket.replica, ticket.rank), None)
        self._drain()

    def _evict(self, buckets: int) -> None:
        self._readers = {reader: read for reader, read in self._readers.items() if read >= buckets}
        self._drain()

    def _drain(self) -> None:
        drained = min(self._readers.values(), default=self._buckets)
        if drained > self.drained:
            self.drained = drained
            for call in self._calls:
                call(drained)


class _Refit:
    def __init__(self, offer: Offer, manifest: Manifest, receive_s: float) -> None:
        self.offer = offer
        self.manifest = manifest
        self.ring = SimulatedRing(receive_s / 4)
        self.sealed = asyncio.Event()
        self.progress: asyncio.Queue[Progress | None] = asyncio.Queue()
        self.receivers: set[asyncio.Task[None]] = set()

    def say(self, ticket: Ticket, kind: ProgressKind, error: PitstopError | None = None) -> None:
        record = None if error is None else error.record()
        self.progress.put_nowait(
            Progress(ticket.refit_id, ticket.replica, ticket.incarnation, ticket.rank, kind, error=record)
        )


class SimulatedTransport:
    """Implements `Transport` for simulated backends of this process. `auto` means `mode`; `slots` make a ring."""

    name = "simulated"

    def __init__(self, script: Script | None = None, *, mode: Mode = "staged", slots: int = 0) -> None:
        self.script = script or Script()
        self.mode = mode
        self.slots = slots
        self._refits: dict[str, _Refit] = {}
        self._last: Offer | None = None

    def replay(self, weight_version: int) -> SimulatedSending | None:
        """See `Transport.replay`."""
        if self._last is None or self._last.weight_version != weight_version:
            return None
        return SimulatedSending(replace(self._last, refit_id=uuid4().hex))

    async def plan(
        self,
        offer: Offer,
        manifest: Manifest,
        receivers: Sequence[WorkerLayout],
        limits: tuple[float, float],
        mode: Mode = "auto",
    ) -> Sequence[Ticket]:
        """See `Transport.plan`."""
        self._refits[offer.refit_id] = _Refit(offer, manifest, limits[0])
        in_place = (self.mode if mode == "auto" else mode) == "in_place"
        return [
            Ticket(
                offer.refit_id, layout.replica, layout.incarnation, layout.rank, "simulated", "", manifest.nbytes,
                (), "", "", *limits, slots=self.slots, in_place=in_place,
            )
            for layout in receivers
        ]  # fmt: skip

    def ring(self, refit_id: str) -> Ring | None:
        """See `Transport.ring`."""
        refit = self._refits.get(refit_id)
        return refit.ring if refit is not None and self.slots else None

    def receive(self, ticket: Ticket, backend: SimulatedBackend) -> asyncio.Task[None] | None:
        """A worker begins to receive; return what goes on until it has, or gives up."""
        refit = self._refits.get(ticket.refit_id)
        if refit is None:
            return None
        refit.ring.joined(ticket)
        receiver = asyncio.create_task(self._receive(refit, ticket, backend), name=f"receive:{ticket.replica}")
        refit.receivers.add(receiver)
        receiver.add_done_callback(refit.receivers.discard)
        receiver.add_done_callback(lambda _: refit.ring.left(ticket))
        return receiver

    async def _receive(self, refit: _Refit, ticket: Ticket, backend: SimulatedBackend) -> None:
        version, names = refit.offer.weight_version, [row.spec.name for row in refit.manifest.rows]
        try:
            await self.script.strike("attach")
            refit.say(ticket, "attached")
            for n, name in enumerate(names if ticket.slots or ticket.in_place else ()):
                await refit.ring.bucket(ticket, n)
                if ticket.in_place:
                    await backend.load(ticket.refit_id, name, version)
            refit.ring.left(ticket)
            await refit.sealed.wait()
            await self.script.strike("land")
            if not ticket.in_place:
                backend.landed(ticket.refit_id, version)
            elif wrong := [name for name in names if backend.live[name] != version]:
                raise DigestMismatch(f"{wrong[0]} is not what was sent", tensor=wrong[0])
        except ReplicaDied:
            return  # the dead say nothing
        except PitstopError as error:
            refit.say(ticket, "failed", error)
        else:
            refit.say(ticket, "landed")

    async def seal(self, trailer: Trailer) -> None:
        """See `Transport.seal`."""
        refit = self._refits[trailer.refit_id]
        self._last = refit.offer
        if not self.slots:
            refit.ring.filled(len(refit.manifest.rows))
        refit.sealed.set()

    async def watch(self, refit_id: str) -> AsyncIterator[Progress]:
        """See `Transport.watch`."""
        refit = self._refits.get(refit_id)
        while refit is not None and (progress := await refit.progress.get()) is not None:
            yield progress

    async def abort(self, refit_id: str, why: PitstopError) -> None:
        """See `Transport.abort`."""
        if (refit := self._refits.get(refit_id)) is not None:
            for receiver in refit.receivers:
                receiver.cancel()

    async def release(self, refit_id: str) -> None:
        """See `Transport.release`."""
        await self.abort(refit_id, RemoteError("the refit is over"))
        if (refit := self._refits.pop(refit_id, None)) is not None:
            refit.progress.put_nowait(None)


class SimulatedSending:
    """Implements `Sending`: a trainer whose weights are a version number."""

    transport = "simulated"

    def __init__(
        self, offer: Offer, *, script: Script | None = None, told: Callable[[RefitReport], None] | None = None
    ) -> None:
        self.offer = offer
        self.script = script or Script()
        self._told = told

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        """See `Sending.send`."""
        await asyncio.sleep(0)
        await self.script.strike("send")
        if ring is not None:
            await self._fill(ring, len(manifest.rows), tickets[0].slots)
        digests = tuple(
            hash((self.offer.weight_version, crc32(row.spec.name.encode()))) & (2**64 - 1) for row in manifest.rows
        )
        return Trailer(self.offer.refit_id, digests)

    async def _fill(self, ring: Ring, buckets: int, slots: int) -> None:
        room = asyncio.Event()
        ring.on_drained(lambda _: room.set())
        for n in range(buckets):
            await self.script.strike("fill")
            while ring.drained <= n - slots:
                room.clear()
                await room.wait()
            ring.filled(n + 1)

    async def settled(self, report: RefitReport) -> None:
        """See `Sending.settled`."""
        if self._told is not None:
            self._told(report)
