"""Weights through one shared segment: the trainer writes it once, every worker rank proves and reads the same bytes.

The segment may be used again only when nobody can touch it any more: its writer has said that it is done or is
dead, and so has every receiver that was let in. Until all of that is known it is nobody's, and a fresh one is made.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Final, Literal
from uuid import uuid4

from pitstop.engine.errors import EngineClosed, OfferRejected, PeerLost, PitstopError, RemoteError
from pitstop.engine.ports import Ring
from pitstop.engine.worker_ports import Manifest, Mode, Offer, Progress, Ticket, Trailer, WorkerLayout
from pitstop.transports.buckets import place
from pitstop.transports.client import Client
from pitstop.transports.codec import fault, raised, words
from pitstop.transports.control import ControlLink
from pitstop.transports.messages import Cancel, LetGo, Noted, Report, Seal
from pitstop.transports.pool import Lease, SegmentPool
from pitstop.transports.receiver import SegmentReceiver
from pitstop.transports.replay import Replay
from pitstop.transports.segment import forget

__all__ = ["SegmentReceiver", "SharedMemoryTransport"]

_MOST_REPLAYS: Final = 8  # that were asked for and not planned yet
RECEIVER: Final = "pitstop.transports.shared_memory:SegmentReceiver"


class SharedMemoryTransport:
    """Implements `ports.Transport`. Lives and ends with the link."""

    name = "shared_memory"

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._pool = SegmentPool()
        self._refits: dict[str, _Refit] = {}
        self._sealed: tuple[Lease, Replay] | None = None
        self._replays: dict[str, Lease] = {}
        link.ticks.append(self._tick)
        link.ended.append(self.close)

    async def plan(
        self,
        offer: Offer,
        manifest: Manifest,
        receivers: Sequence[WorkerLayout],
        limits: tuple[float, float],
        mode: Mode = "auto",
    ) -> Sequence[Ticket]:
        """See `Transport.plan`."""
        try:
            async with asyncio.timeout(limits[1]):
                await self._link.ready()
        except TimeoutError:
            raise EngineClosed("the control link does not run") from None
        # In a thread: a mixture of experts has tens of thousands of rows, and letting go of memory takes its time.
        placed, nbytes = await asyncio.to_thread(place, [row.spec for row in manifest.rows])
        replay = self._replays.pop(offer.refit_id, None)
        if replay is None:
            lease = await self._taken(offer.refit_id, nbytes)
        else:
            again = self._pool.again(offer.refit_id, replay)
            if again is None:
                raise OfferRejected(f"version {offer.weight_version} no longer lies in shared memory")
            lease = again
        self._refits[offer.refit_id] = refit = _Refit(lease, limits[1], offer, manifest)
        tickets = []
        for layout in receivers:
            token = secrets.token_hex(16)
            ticket = Ticket(
                offer.refit_id, layout.replica, layout.incarnation, layout.rank, RECEIVER, lease.segment.path,
                lease.segment.nbytes, placed, self._link.address, token, *limits,
            )  # fmt: skip
            refit.seats[token] = seat = _Seat(refit, ticket)
            self._link.expect(token, seat)
            tickets.append(ticket)
        return tickets

    async def seal(self, trailer: Trailer) -> None:
        """See `Transport.seal`."""
        refit = self._refits.get(trailer.refit_id)
        if refit is not None and refit.last_word is None:
            self._sealed = refit.lease, Replay(refit.offer, refit.manifest, trailer.digests)
            refit.last_word = Seal(trailer.refit_id, words(trailer.digests))
            refit.sealed_at = monotonic()
            for seat in refit.seats.values():
                seat.tell(refit.last_word)

    def ring(self, refit_id: str) -> Ring | None:
        """See `Transport.ring`."""

    async def watch(self, refit_id: str) -> AsyncIterator[Progress]:
        """See `Transport.watch`."""
        refit = self._refits.get(refit_id)
        while refit is not None and (progress := await refit.progress.get()) is not None:
            yield progress

    async def abort(self, refit_id: str, why: PitstopError) -> None:
        """See `Transport.abort`."""
        refit = self._refits.get(refit_id)
        if refit is not None and not isinstance(refit.last_word, Cancel):
            refit.last_word = Cancel(refit_id, fault(why))
            for seat in refit.seats.values():
                seat.tell(refit.last_word)

    async def release(self, refit_id: str) -> None:
        """See `Transport.release`. The segment is used again if every receiver has let go of it by then or later."""
        refit = self._refits.pop(refit_id, None)
        if refit is not None:
            for token in refit.seats:
                self._link.forget(token)
            refit.lease.over = True
            refit.progress.put_nowait(None)

    def replay(self, weight_version: int) -> Replay | None:
        """See `Transport.replay`."""
        if self._sealed is None or self._sealed[1].offer.weight_version != weight_version:
            return None
        lease, sealed = self._sealed
        if not self._pool.holds(lease):
            return None
        replay = sealed.renamed(uuid4().hex)
        self._replays[replay.offer.refit_id] = lease
        if len(self._replays) > _MOST_REPLAYS:
            self._replays.pop(next(iter(self._replays)))
        return replay

    def close(self) -> None:
        """Let go of all memory. Idempotent."""
        for refit in self._refits.values():
            refit.progress.put_nowait(None)
        self._refits.clear()
        self._sealed = None
        self._replays.clear()
        self._pool.close()
        # In a thread: this may run on a loop that others use, and unmapping a model takes its time.
        threading.Thread(target=forget, args=(self._link.address,), name="pitstop-forget", daemon=True).start()

    async def _taken(self, refit_id: str, nbytes: int) -> Lease:
        taking = asyncio.get_running_loop().run_in_executor(None, self._pool.take, refit_id, nbytes)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # The thread goes on, and what it takes would be nobody's: nobody would ever say that it is over.
            taking.add_done_callback(_given_back)
            raise

    def _tick(self) -> None:
        for refit in self._refits.values():
            for seat in refit.seats.values():
                seat.tick()


def _given_back(taking: asyncio.Future[Lease]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().over = True


class _Refit:
    def __init__(self, lease: Lease, silence_s: float, offer: Offer, manifest: Manifest) -> None:
        self.lease = lease
        self.offer = offer
        self.manifest = manifest
        self.silence_s = silence_s
        self.seats: dict[str, _Seat] = {}
        self.progress: asyncio.Queue[Progress | None] = asyncio.Queue()
        self.last_word: Seal | Cancel | None = None
        self.sealed_at = 0.0


class _Seat:
    """One receiver. Whether it came, whether it has ended, and whether it may still look into the segment."""

    def __init__(self, refit: _Refit, ticket: Ticket) -> None:
        self.refit_id = ticket.refit_id
        self.name = f"receiver {ticket.rank} of {ticket.replica}"
        self._refit = refit
        self._ticket = ticket
        self._client: Client | None = None
        self._ended = False

    def welcomed(self, client: Client) -> None:
        """See `control.Seat.welcomed`."""
        self._client = client
        self._refit.lease.readers.add(self._ticket.token)
        if self._refit.last_word is not None:
            client.post(self._refit.last_word)

    def heard(self, message: Report | LetGo) -> None:
        """See `control.Seat.heard`."""
        lease, token = self._refit.lease, self._ticket.token
        if isinstance(message, LetGo):
            lease.readers.discard(token)
        elif message.kind != "attached":
            if not message.holds:
                lease.readers.discard(token)
            if self._client is not None:
                self._client.beats = False
        if self._client is not None and (isinstance(message, LetGo) or message.kind != "attached"):
            self._client.post(Noted(self.refit_id))
        if isinstance(message, Report):
            error = None if message.error is None else raised(message.error)
            self._report(message.kind, error, message.nbytes, message.seconds)

    def lost(self, error: PitstopError) -> None:
        """See `control.Seat.lost`."""
        self._refit.lease.readers.discard(self._ticket.token)
        self._report("failed", error)

    def tell(self, word: Seal | Cancel) -> None:
        """Pass a word on, if there is somebody to hear it."""
        if self._client is not None and not self._ended:
            self._client.post(word)

    def tick(self) -> None:
        """Look whether it is still there, or should have come by now."""
        if self._ended:
            return
        seconds = self._refit.silence_s
        heard = self._refit.sealed_at if self._client is None else self._client.heard_at
        if heard and monotonic() - heard > seconds:
            lost = PeerLost(f"{self.name} said nothing for {seconds:g} s", peer=self.name, seconds=seconds)
            self._report("failed", lost)

    def _report(
        self,
        kind: Literal["attached", "landed", "failed"],
        error: PitstopError | None,
        nbytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        if self._ended:
            return
        self._ended = kind != "attached"
        ticket = self._ticket
        if kind == "failed":
            error = error or RemoteError(f"{self.name} gave up")
            error.fields.setdefault("replica", ticket.replica)
            error.fields.setdefault("rank", ticket.rank)
        self._refit.progress.put_nowait(
            Progress(
                self.refit_id, ticket.replica, ticket.incarnation, ticket.rank, kind, nbytes, seconds,
                None if error is None else error.record(),
            )
        )  # fmt: skip
