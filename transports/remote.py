"""A trainer in another process, as the engine sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Protocol

from pitstop.engine.errors import DeadlineExceeded, LocalError, PeerLost, PitstopError, ProtocolViolation
from pitstop.engine.ports import Ring
from pitstop.engine.refit import RefitReport
from pitstop.engine.worker_ports import Manifest, Offer, Ticket, Trailer
from pitstop.transports.codec import fault, numbers, raised
from pitstop.transports.messages import Cancel, Drained, Faulted, Filled, FromEngine, Lend, Sent
from pitstop.transports.pool import WRITING
from pitstop.transports.reports import accept, settled, way_of


class Peer(Protocol):
    """The trainer's end of the link."""

    name: str
    heard_at: float  #: on the monotonic clock

    def post(self, message: FromEngine) -> bool:
        """Send a message; False if the trainer is gone or reads nothing."""

    def accepted(self, refit_id: str) -> None:
        """The trainer was told to write."""

    def settled(self, refit_id: str) -> None:
        """The trainer was told how its refit ended, or is past telling."""


class RemoteSending:
    """Implements `ports.Sending`. `policy`, `mode`, `deadlines`, `rebase` are the trainer's wishes; unset: left out."""

    def __init__(
        self,
        offer: Offer,
        peer: Peer,
        policy: str | None,
        deadlines: Mapping[str, float],
        *,
        rebase: bool = False,
        mode: str | None = None,
    ) -> None:
        self.offer = offer
        self.transport = "shared_memory"
        self.rebase = rebase
        self.policy = policy
        self.mode = mode
        self.deadlines = dict(deadlines)
        self._peer = peer
        self._digests: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        self._asked: tuple[float, float] | None = None
        self._ring: Ring | None = None

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        """See `Sending.send`.

        Raises:
            PeerLost: the trainer died or was silent for the tickets' `silence_s`.
            DeadlineExceeded: it was not done within their `receive_s`.
            PitstopError: what the trainer failed with.
        """
        refit_id = self.offer.refit_id
        if self._digests.done():
            return self._trailer()
        if len({ticket.buffer for ticket in tickets}) != 1:
            raise LocalError(f"the tickets of {refit_id} name no buffer, or several")
        first = tickets[0]
        self.transport = way_of(first)
        message = await asyncio.to_thread(accept, manifest, first)
        if ring is not None:
            self._ring = ring
            ring.on_drained(lambda buckets: self._peer.post(Drained(refit_id, buckets)))
        self._peer.accepted(refit_id)
        WRITING.add(refit_id)
        self._asked = monotonic(), first.silence_s
        if not self._peer.post(message):
            WRITING.discard(refit_id)
            raise PeerLost(f"{self._peer.name} takes no messages", peer=self._peer.name)
        try:
            async with asyncio.timeout(first.receive_s):
                await asyncio.wait({self._digests})
        except TimeoutError:
            late = DeadlineExceeded(
                f"{self._peer.name} did not send everything within {first.receive_s:g} s",
                phase="send", peer=self._peer.name, seconds=first.receive_s,
            )  # fmt: skip
            self._give_up(late)
            raise late from None
        except asyncio.CancelledError:
            self._give_up(PeerLost("the engine gave this refit up", peer="engine"))
            raise
        trailer = self._trailer()
        if len(trailer.digests) != len(manifest.rows):
            raise ProtocolViolation(f"{len(trailer.digests)} digests for {len(manifest.rows)} tensors")
        return trailer

    async def settled(self, report: RefitReport) -> None:
        """See `Sending.settled`."""
        with contextlib.suppress(PitstopError):
            self._peer.post(settled(report))
        self._peer.settled(self.offer.refit_id)

    def poured(self, message: Lend | Filled) -> None:
        """The trainer lends a ring, or has written into it.

        Raises:
            ProtocolViolation: there is no ring, or no room in it.
        """
        if self._digests.done():
            return
        if self._ring is None:
            raise ProtocolViolation(f"{type(message).__name__} where there is no ring")
        try:
            if isinstance(message, Lend):
                self._ring.lent(message.handle, message.nbytes)
            else:
                self._ring.filled(message.buckets)
        except ProtocolViolation as error:
            self._give_up(error)
            self.failed(error)
            raise

    def heard(self, message: Sent | Faulted) -> None:
        """The trainer is done with the buffer, one way or the other."""
        WRITING.discard(self.offer.refit_id)
        if self._digests.done():
            return
        if isinstance(message, Faulted):
            self.failed(raised(message.error))
            return
        try:
            self._digests.set_result(numbers(message.digests))
        except ProtocolViolation as error:
            self.failed(error)

    def failed(self, error: PitstopError) -> None:
        """Whoever waits gets `error`. Whether the trainer still writes is another matter."""
        if not self._digests.done():
            self._digests.set_exception(error)
            self._digests.exception()  # nobody may ever ask, which is no reason to complain

    def tick(self) -> None:
        """Look whether the trainer is still there."""
        if self._asked is None or self._digests.done():
            return
        # Silence counts from when it was told to write: it may have had nothing to do before.
        since, seconds = self._asked
        if monotonic() - max(since, self._peer.heard_at) > seconds:
            lost = PeerLost(f"{self._peer.name} said nothing for {seconds:g} s", peer=self._peer.name, seconds=seconds)
            self._give_up(lost)
            self.failed(lost)

    def _give_up(self, why: PitstopError) -> None:
        self._peer.post(Cancel(self.offer.refit_id, fault(why)))

    def _trailer(self) -> Trailer:
        return Trailer(self.offer.refit_id, self._digests.result())
