"""Weights through memory that trainer and workers share.

Either one segment that holds a whole version (the trainer writes it once, every worker rank proves and reads the same
bytes), or a ring of slots through which it travels in buckets, in host memory or on the GPU that both use
(`room.choose` says when). A segment may be used again only when nobody can touch it any more: its writer has said that
it is done or is dead, and so has every receiver that was let in. Until all of that is known it is nobody's, and a
fresh one is made.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Final
from uuid import uuid4

from pitstop.engine.errors import EngineClosed, InvalidRequest, OfferRejected, PitstopError, ProtocolViolation
from pitstop.engine.ports import Ring
from pitstop.engine.worker_ports import Manifest, Mode, Offer, Progress, Ticket, Trailer, WorkerLayout
from pitstop.transports import memory
from pitstop.transports.buckets import cut, place
from pitstop.transports.codec import fault, words
from pitstop.transports.control import ControlLink
from pitstop.transports.messages import Cancel, Seal
from pitstop.transports.pool import Lease, SegmentPool
from pitstop.transports.receiver import SegmentReceiver
from pitstop.transports.replay import Replay
from pitstop.transports.room import Buffers, Way, choose, pace, shares_gpu
from pitstop.transports.seats import Seated, Underway
from pitstop.transports.segment import forget

__all__ = ["SegmentReceiver", "SharedMemoryTransport"]

_LOG: Final = logging.getLogger(__name__)
_LEAVING_S: Final = 1.0
_LOOK_S: Final = 0.01
_MOST_REPLAYS: Final = 8  # that were asked for and not planned yet
RECEIVER: Final = "pitstop.transports.shared_memory:SegmentReceiver"
RING_RECEIVER: Final = "pitstop.transports.ring_receiver:RingReceiver"
RECEIVERS: Final = (RECEIVER, RING_RECEIVER)
"""What tickets may name: workers prepare them when they start."""


class SharedMemoryTransport:
    """Implements `ports.Transport`. Lives and ends with the link."""

    name = "shared_memory"

    def __init__(self, link: ControlLink, buffers: Buffers | None = None) -> None:
        self._link = link
        if buffers is not None and not isinstance(buffers, Buffers):
            raise InvalidRequest(f"buffers is a {type(buffers).__name__}, not `pitstop.transports.Buffers`")
        self._buffers = buffers or Buffers()
        self._pool = SegmentPool()
        self._refits: dict[str, Underway] = {}
        self._sealed: tuple[Lease, Replay] | None = None
        self._replays: dict[str, Lease] = {}
        self._kept: dict[tuple[str, int], tuple[int, int]] = {}
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
        specs = [row.spec for row in manifest.rows]
        placed, nbytes = await asyncio.to_thread(place, specs)
        replay = self._replays.pop(offer.refit_id, None)
        buckets = 0
        if replay is None:
            free, whose = memory.available()
            if not shares_gpu(offer.device, receivers):
                free += self._pool.reusable()
            kept = sum(min(nbytes, self._kept_by(layout)) for layout in receivers)
            way = choose(nbytes, offer.device, receivers, mode, self._buffers, free, whose, kept)
            _LOG.info("version %d travels by %s: %s", offer.weight_version, way.name, way.why)
            if way.slots:
                buckets = len(await asyncio.to_thread(cut, specs, way.slot_nbytes))
            # Last: nothing may end this between the lease and the refit that `release` finds it by.
            lease = await self._room(offer.refit_id, way, nbytes)
        else:
            way = Way("shared_memory", "shared_memory", 0, 0, "it still lies there")
            lease = self._pool.again(offer.refit_id, replay)
            if lease is None:
                raise OfferRejected(f"version {offer.weight_version} no longer lies in shared memory")
        refit = Underway(offer, manifest, lease, limits)
        if way.slots:
            refit.paced(buckets, way.slots, way.slots * way.slot_nbytes if way.name == "cuda_ipc" else 0)
        self._refits[offer.refit_id] = refit
        device = offer.device if way.name == "cuda_ipc" else ""
        most = pace(way, self._buffers, len(receivers), limits)
        tickets = []
        for layout in receivers:
            token = secrets.token_hex(16)
            ticket = Ticket(
                offer.refit_id, layout.replica, layout.incarnation, layout.rank,
                RING_RECEIVER if way.slots else RECEIVER,
                lease.segment.path if lease is not None else "",
                lease.segment.nbytes if lease is not None else way.slots * way.slot_nbytes,
                placed, self._link.address, token, *limits,
                slots=way.slots, slot_nbytes=way.slot_nbytes, device=device, in_place=way.in_place,
                staging=way.staging, why=way.why, pace=most,
            )  # fmt: skip
            refit.seats[token] = seat = Seated(refit, ticket)
            self._link.expect(token, seat)
            tickets.append(ticket)
        return tickets

    async def seal(self, trailer: Trailer) -> None:
        """See `Transport.seal`."""
        refit = self._refits.get(trailer.refit_id)
        if refit is not None and refit.last_word is None:
            if refit.ring is not None and not refit.ring.whole:
                # Receivers would wait for the rest, which nobody is going to write, for as long as they may.
                raise ProtocolViolation(f"{trailer.refit_id} was said to be sent before all of it was in the ring")
            # What came through a ring lies nowhere; and what lay somewhere is no longer the last version.
            self._sealed = None
            if refit.lease is not None and refit.ring is None:
                self._sealed = refit.lease, Replay(refit.offer, refit.manifest, trailer.digests)
            refit.last_word = Seal(trailer.refit_id, words(trailer.digests))
            refit.sealed_at = monotonic()
            refit.tell(refit.last_word)

    def ring(self, refit_id: str) -> Ring | None:
        """See `Transport.ring`."""
        refit = self._refits.get(refit_id)
        return None if refit is None else refit.ring

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
            refit.tell(refit.last_word)

    async def release(self, refit_id: str) -> None:
        """See `Transport.release`. The segment is used again if every receiver has let go of it by then or later."""
        refit = self._refits.pop(refit_id, None)
        if refit is not None:
            for token, seat in refit.seats.items():
                self._link.forget(token)
                self._keeps(seat)
            if refit.lease is not None:
                refit.lease.over = True
            refit.progress.put_nowait(None)
            if isinstance(refit.last_word, Cancel):
                # What these still hold would be missed by the next refit: it would find no room, or take it twice.
                until = monotonic() + _LEAVING_S
                while monotonic() < until and any(seat.leaving for seat in refit.seats.values()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)

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

    async def _room(self, refit_id: str, way: Way, nbytes: int) -> Lease | None:
        if way.name == "cuda_ipc":
            return None  # the trainer lends it
        if way.slots:
            nbytes = way.slots * way.slot_nbytes
        taking = asyncio.get_running_loop().run_in_executor(None, self._pool.take, refit_id, nbytes)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # The thread goes on, and what it takes would be nobody's: nobody would ever say that it is over.
            taking.add_done_callback(_given_back)
            raise

    def _kept_by(self, layout: WorkerLayout) -> int:
        life, nbytes = self._kept.get((layout.replica, layout.rank), (0, 0))
        return nbytes if life == layout.incarnation else 0

    def _keeps(self, seat: Seated) -> None:
        """Remember what a receiver keeps for the next staged ring: it is not free, but it need not be."""
        ticket = seat.ticket
        if ticket.slots:
            place = ticket.replica, ticket.rank
            if ticket.staging != "host":
                self._kept.pop(place, None)
            elif seat.landed or seat.kept:
                nbytes = seat.kept or sum(placed.spec.nbytes for placed in ticket.tensors)
                self._kept[place] = ticket.incarnation, nbytes

    def _tick(self) -> None:
        for refit in list(self._refits.values()):
            refit.tick()


def _given_back(taking: asyncio.Future[Lease]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().over = True
