"""Several ranks of one trainer: rank 0 sends, and the others are told how that ended. Pure, but for who is told.

The n-th publish of every rank is the same publish. A rank that joined first waits for rank 0; what rank 0 has ended
is remembered for ranks that come later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol

from msgspec.structs import replace

from pitstop.engine.errors import DeadlineExceeded, PeerLost, PitstopError, ProtocolViolation, PublishOrder
from pitstop.transports.codec import fault
from pitstop.transports.messages import FromEngine, Hello, Join, Propose, Refuse, Settled
from pitstop.transports.session import MOST_OPEN

_REMEMBERED: Final = 256


class Member(Protocol):
    """A rank's end of the link."""

    name: str

    def post(self, message: FromEngine) -> bool:
        """Send a message."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    member: Member
    join: Join
    since: float


class Group:
    """The ranks of one trainer, while its rank 0 is connected, and as long as any other of them is."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.led = False
        self.members = 0
        self._clock = clock
        self._lost: PitstopError | None = None
        self._open: dict[str, int] = {}
        self._versions: dict[int, int] = {}
        self._ended: dict[int, Settled | Refuse] = {}
        self._waiting: list[_Waiting] = []

    def offered(self, message: Propose) -> None:
        """Rank 0 offers a version."""
        self._open[message.refit_id] = message.number
        self._versions[message.number] = message.weight_version
        while len(self._versions) > _REMEMBERED:
            oldest = next(iter(self._versions))
            del self._versions[oldest]
            self._ended.pop(oldest, None)
        for waiting in [w for w in self._waiting if w.join.number == message.number]:
            if waiting.join.weight_version != message.weight_version:
                self._waiting.remove(waiting)
                _refuse(waiting.member, waiting.join, _order(waiting, message.weight_version))

    def joined(self, member: Member, join: Join) -> None:
        """Another rank takes part.

        Raises:
            ProtocolViolation: it has more open than it may.
        """
        waiting = _Waiting(member, join, self._clock())
        version, end = self._versions.get(join.number), self._ended.get(join.number)
        if version is not None and version != join.weight_version:
            _refuse(member, join, _order(waiting, version))
        elif end is not None:
            _tell(member, join, end)
        elif self._lost is not None:
            _refuse(member, join, self._lost)
        elif version is None and any(number > join.number for number in self._versions):
            _refuse(member, join, PublishOrder(f"rank 0 is past publish {join.number} of {member.name}"))
        elif sum(one.member is member for one in self._waiting) >= MOST_OPEN:
            raise ProtocolViolation(f"more than {MOST_OPEN} publishes of {member.name} wait")
        else:
            self._waiting.append(waiting)

    def ended(self, message: Settled | Refuse) -> None:
        """Rank 0 is told how a refit ended."""
        number = self._open.pop(message.refit_id, None)
        if number is None:
            return
        if number in self._versions:
            self._ended[number] = message
        for waiting in [w for w in self._waiting if w.join.number == number]:
            self._waiting.remove(waiting)
            _tell(waiting.member, waiting.join, message)

    def left(self, error: PitstopError) -> None:
        """Rank 0 is gone. What it had offered goes its way; nothing more will come."""
        self._lost = error
        for waiting in [w for w in self._waiting if w.join.number not in self._open.values()]:
            self._waiting.remove(waiting)
            _refuse(waiting.member, waiting.join, error)

    def forget(self, member: Member) -> None:
        """A rank is gone."""
        self._waiting = [waiting for waiting in self._waiting if waiting.member is not member]

    def tick(self) -> None:
        """Look whether a rank has waited for rank 0 for too long. The refit itself has limits of its own."""
        for waiting in list(self._waiting):
            join = waiting.join
            if join.number not in self._versions and self._clock() - waiting.since > join.receive_s:
                self._waiting.remove(waiting)
                late = DeadlineExceeded(
                    f"rank 0 did not publish version {join.weight_version} within {join.receive_s:g} s",
                    phase="publish", peer="rank 0", seconds=join.receive_s,
                )  # fmt: skip
                _refuse(waiting.member, join, late)


class Ranks:
    """The groups of one engine, by name. A rank that comes before its rank 0 waits in the group that will be led."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self._of: dict[int, tuple[str, Group, bool]] = {}

    def came(self, member: Member, hello: Hello) -> Group | None:
        """Return the group that a new client belongs to, if its trainer has several ranks."""
        if hello.role != "trainer" or hello.world_size < 2:
            return None
        group, leads = self.groups.get(hello.group), hello.rank == 0
        # A second rank 0 is a trainer that was restarted: its ranks must not hear what the other one did.
        if group is None or (leads and group.led):
            self.groups[hello.group] = group = Group()
        group.led = group.led or leads
        group.members += 1
        self._of[id(member)] = hello.group, group, leads
        return group

    def went(self, member: Member, error: PitstopError) -> None:
        """A client is gone."""
        name, group, leads = self._of.pop(id(member), ("", None, False))
        if group is None:
            return
        group.members -= 1
        group.forget(member)
        if leads:
            group.left(PeerLost(f"rank 0 is gone: {error.message}", peer="rank 0"))
        # Who comes from now on belongs to the next rank 0.
        if (leads or not group.members) and self.groups.get(name) is group:
            del self.groups[name]

    def tick(self) -> None:
        """See `Group.tick`."""
        for group in {id(group): group for _, group, _ in self._of.values()}.values():
            group.tick()


def _tell(member: Member, join: Join, end: Settled | Refuse) -> None:
    if isinstance(end, Settled):
        member.post(replace(end, joined=join.refit_id))
    else:
        member.post(replace(end, refit_id=join.refit_id))


def _refuse(member: Member, join: Join, error: PitstopError) -> None:
    member.post(Refuse(fault(error), join.refit_id))


def _order(waiting: _Waiting, version: int) -> PublishOrder:
    join = waiting.join
    return PublishOrder(
        f"publish {join.number} of {waiting.member.name} is version {join.weight_version} and of rank 0 it is "
        f"version {version}: every rank publishes the same versions in the same order",
        weight_version=join.weight_version, peer="rank 0",
    )  # fmt: skip
