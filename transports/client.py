"""One client of the control link, as its reader keeps it."""

from __future__ import annotations

from time import monotonic
from typing import Protocol

from pitstop.engine.errors import PitstopError
from pitstop.transports.hub import Hub
from pitstop.transports.messages import Drained, FromEngine, Hello, LetGo, Refuse, Report, Settled
from pitstop.transports.ranks import Group
from pitstop.transports.remote import RemoteSending
from pitstop.transports.session import Session
from pitstop.transports.zmq_link import pidfd


class Seat(Protocol):
    """A receiver that was given a ticket, whether it has come or not. Belongs to a transport."""

    refit_id: str
    name: str

    def welcomed(self, client: Client) -> None:
        """It has said Hello with its ticket's token."""

    def heard(self, message: Report | LetGo | Drained) -> None:
        """It reports."""

    def lost(self, error: PitstopError) -> None:
        """Its process is dead, or it has closed the link: it reads nothing any more."""


class Client:
    """One connected client."""

    def __init__(self, hub: Hub, identity: bytes, hello: Hello, seat: Seat | None) -> None:
        rank = f", rank {hello.rank} of {hello.world_size}" if hello.world_size > 1 else ""
        self.name = f"trainer (process {hello.pid}{rank})" if seat is None else seat.name
        self.group: Group | None = None
        self.seat = seat
        self.session = Session("trainer", rank=hello.rank) if seat is None else Session("receiver", seat.refit_id)
        self.heard_at = monotonic()
        self.sendings: dict[str, RemoteSending] = {}
        self.violations = 0
        self.died_at: float | None = None
        self.beats = True
        self.pidfd = pidfd(hello.pid, hello.pid_space)
        self._hub = hub
        self._identity = identity

    def post(self, message: FromEngine) -> bool:
        """Send a message; False if the client is gone or reads nothing. What ends a refit goes to its ranks too."""
        if isinstance(message, Settled | Refuse) and self.group is not None and not self.session.rank:
            self.group.ended(message)
        return self._hub.send(self._identity, message)

    def accepted(self, refit_id: str) -> None:
        """See `remote.Peer.accepted`."""
        self.session.accepted(refit_id)

    def settled(self, refit_id: str) -> None:
        """See `remote.Peer.settled`."""
        self.session.settled(refit_id)
        self.sendings.pop(refit_id, None)
