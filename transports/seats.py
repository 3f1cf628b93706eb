"""One refit in the transport's hands: its receivers, the room it takes, and the pace of its ring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final, Literal

from pitstop.engine.errors import DeadlineExceeded, PeerLost, PitstopError, ProtocolViolation, RemoteError
from pitstop.engine.worker_ports import Manifest, Offer, Progress, Ticket
from pitstop.transports.client import Client
from pitstop.transports.codec import fault, raised
from pitstop.transports.messages import Cancel, Drained, Filled, FromEngine, Lend, LetGo, Noted, Report, Seal
from pitstop.transports.pace import Pace, patience
from pitstop.transports.pool import Lease

_HELD: Final = 2  # of the time that all have, the share that one reader may cost the others, bucket by bucket


class Underway:
    """One refit from its plan to its release."""

    def __init__(self, offer: Offer, manifest: Manifest, lease: Lease | None, limits: tuple[float, float]) -> None:
        self.offer = offer
        self.manifest = manifest
        self.lease = lease
        self.silence_s = limits[1]
        self.patience = patience(*limits)
        self.most_held = limits[0] / _HELD
        self.ring: Pacing | None = None
        self.seats: dict[str, Seated] = {}
        self.progress: asyncio.Queue[Progress | None] = asyncio.Queue()
        self.last_word: Seal | Cancel | None = None
        self.sealed_at = 0.0

    def paced(self, buckets: int, slots: int, lent_nbytes: int = 0) -> None:
        """It goes through a ring: one of `lent_nbytes` that the trainer has to lend, if not 0."""
        self.ring = Pacing(self, Pace(buckets, slots), lent_nbytes)

    def tell(self, word: FromEngine) -> None:
        """Tell every receiver that has come and not ended."""
        for seat in self.seats.values():
            seat.tell(word)

    def tick(self) -> None:
        """Look whether all are still there and keep up."""
        for seat in self.seats.values():
            seat.tick()
        if self.ring is not None:
            for token in self.ring.pace.overdue(self.patience):
                self.seats[token].evict(self.patience, "over one bucket")
            for token in self.ring.pace.holding(self.most_held):
                self.seats[token].evict(self.most_held, "more than the others, who waited for it")


class Pacing:
    """Implements `ports.Ring`."""

    def __init__(self, refit: Underway, pace: Pace, lent_nbytes: int) -> None:
        self.pace = pace
        self.lend: Lend | None = None
        self._lent_nbytes = lent_nbytes
        self._refit = refit
        self._calls: list[Callable[[int], object]] = []

    @property
    def drained(self) -> int:
        """See `Ring.drained`."""
        return self.pace.drained

    @property
    def whole(self) -> bool:
        """Whether everything has been written."""
        return self.pace.filled == self.pace.buckets

    def lent(self, handle: bytes, nbytes: int) -> None:
        """See `Ring.lent`."""
        if not self._lent_nbytes or nbytes < self._lent_nbytes:
            raise ProtocolViolation(f"a ring of {nbytes} bytes was lent, where {self._lent_nbytes} were asked for")
        if self.lend is not None or self.pace.filled:
            raise ProtocolViolation("the ring was lent before")
        self.lend = Lend(self._refit.offer.refit_id, handle, nbytes)
        self._refit.tell(self.lend)

    def filled(self, buckets: int) -> None:
        """See `Ring.filled`."""
        if self._lent_nbytes and self.lend is None:
            raise ProtocolViolation("something was written into a ring that was never lent")
        self.pace.fill(buckets)
        self._refit.tell(Filled(self._refit.offer.refit_id, buckets))

    def on_drained(self, call: Callable[[int], object]) -> None:
        """See `Ring.on_drained`."""
        self._calls.append(call)

    def moved(self, grown: bool) -> None:
        """Pass on that `drained` has grown, if it has."""
        if grown:
            for call in self._calls:
                call(self.pace.drained)


class Seated:
    """Implements `client.Seat`. Whether a receiver came, has ended, and may still look into the buffer."""

    def __init__(self, refit: Underway, ticket: Ticket) -> None:
        self.refit_id = ticket.refit_id
        self.name = f"receiver {ticket.rank} of {ticket.replica}"
        self._refit = refit
        self.ticket = ticket
        self.landed = False
        self.kept = 0
        """Bytes of host memory that it has said to keep, having failed."""
        self.leaving = False
        """Whether it holds memory of the refit, and can be expected to let go of it soon."""
        self._client: Client | None = None
        self._ended = False

    def welcomed(self, client: Client) -> None:
        """See `client.Seat.welcomed`."""
        self._client = client
        self.leaving = True
        if self._refit.lease is not None:
            self._refit.lease.readers.add(self.ticket.token)
        if self._refit.ring is not None and self._refit.ring.lend is not None:
            client.post(self._refit.ring.lend)  # one that comes late would hold up the others until it is evicted
        if self._refit.last_word is not None:
            client.post(self._refit.last_word)

    def heard(self, message: Report | LetGo | Drained) -> None:
        """See `client.Seat.heard`."""
        ring = self._refit.ring
        if isinstance(message, Drained):
            if ring is None:
                raise ProtocolViolation(f"{self.name} drained a bucket where there is no ring")
            ring.moved(ring.pace.drain(self.ticket.token, message.buckets))
            return
        if isinstance(message, Report) and message.kind == "attached" and ring is not None and not self._ended:
            ring.pace.join(self.ticket.token)
        if isinstance(message, LetGo) or (message.kind != "attached" and not message.holds):
            self._let_go()
        if self._client is not None and (isinstance(message, LetGo) or message.kind != "attached"):
            self._client.beats = self._client.beats and isinstance(message, LetGo)
            self._client.post(Noted(self.refit_id))
        if isinstance(message, Report):
            error = None if message.error is None else raised(message.error)
            failed = message.kind == "failed"
            self.kept = message.nbytes if failed else 0
            self._report(message.kind, error, 0 if failed else message.nbytes, message.seconds)

    def lost(self, error: PitstopError) -> None:
        """See `client.Seat.lost`."""
        self._let_go()
        self._report("failed", error)

    def evict(self, seconds: float, over: str) -> None:
        """It has held up the others for too long; it may still be looking into the buffer."""
        late = DeadlineExceeded(
            f"{self.name} took longer than {seconds:g} s {over}",
            phase="receive", peer=self.name, seconds=seconds,
        )  # fmt: skip
        self._give_up(late)

    def tell(self, word: FromEngine) -> None:
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
            self._give_up(lost)

    def _give_up(self, why: PitstopError) -> None:
        self.leaving = False
        self.tell(Cancel(self.refit_id, fault(why)))
        self._report("failed", why)

    def _let_go(self) -> None:
        self.leaving = False
        if self._refit.lease is not None:
            self._refit.lease.readers.discard(self.ticket.token)

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
        self.landed = kind == "landed"
        ticket, ring = self.ticket, self._refit.ring
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
        if self._ended and ring is not None:
            ring.moved(ring.pace.leave(ticket.token))
