"""The lifecycle of one replica, as a table.

Two rules: everything that decides a phase is in `TABLE`, and nothing in this file knows how an action is done.
Drivers perform the action that `advance` names and feed its outcome back as the next event.

The edges that do not exist matter most. There is no way from RECEIVING, FINALIZING or QUARANTINED to SERVING
that does not pass `Finalized`, because that is where the ledger commits: a replica whose weights are half new
would otherwise answer requests. QUARANTINED and IDLE take a full refit only: a delta needs a proven base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

from pitstop.engine.errors import IllegalEvent


class Phase(Enum):
    """Where a replica is. Exactly one at a time, assigned by `advance` alone."""

    STARTING = "starting"  #: the engine boots
    IDLE = "idle"  #: runs, but no version is committed: takes a full refit, serves nothing
    SERVING = "serving"  #: admits requests under a committed version
    SUSPENDING = "suspending"  #: the gate is closed, requests in flight are treated as the policy says
    RECEIVING = "receiving"  #: new weights go into the live parameters
    FINALIZING = "finalizing"  #: post-load work, proof, caches
    RESUMING = "resuming"  #: a version is committed, held work is released
    SLEEPING = "sleeping"  #: memory is given back
    QUARANTINED = "quarantined"  #: live weights are not to be trusted: only a full refit leads out
    DEAD = "dead"  #: the engine process is gone
    STOPPED = "stopped"  #: ended by its owner


class Do(Enum):
    """What the driver does on the way into a phase."""

    REST = "rest"
    BOOT = "boot"
    ADMIT = "admit"
    SUSPEND = "suspend"
    RECEIVE = "receive"
    FINALIZE = "finalize"
    COMMIT = "commit"
    RELEASE = "release"
    REVOKE = "revoke"
    PARK = "park"
    SLEEP = "sleep"
    WAKE = "wake"
    BURY = "bury"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class BootedWith:
    """The engine is up and the checkpoint's version is committed."""

    weight_version: int


@dataclass(frozen=True, slots=True)
class BootedEmpty:
    """The engine is up with weights that prove nothing (a dummy load, a restart)."""


@dataclass(frozen=True, slots=True)
class RefitOffered:
    """A full version is staged, or ready to be received, for this replica."""

    refit_id: str
    weight_version: int


@dataclass(frozen=True, slots=True)
class DeltaOffered:
    """A delta against the committed version is ready for this replica."""

    refit_id: str
    weight_version: int
    base_version: int


@dataclass(frozen=True, slots=True)
class Suspended:
    """No token is being made; `live` requests are held inside the engine."""

    live: int


@dataclass(frozen=True, slots=True)
class WeightsLanded:
    """Every declared tensor is in the live parameters."""


@dataclass(frozen=True, slots=True)
class Finalized:
    """Post-load work is done, the content is proven, the caches are as the policy wants them."""

    weight_version: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine makes tokens again."""


@dataclass(frozen=True, slots=True)
class FailedClean:
    """The refit failed before any live byte changed: the commit stands."""

    slug: str


@dataclass(frozen=True, slots=True)
class FailedUncommitted:
    """The refit of an idle replica failed before any live byte changed."""

    slug: str


@dataclass(frozen=True, slots=True)
class FailedQuarantined:
    """The refit of a quarantined replica failed before any live byte changed."""

    slug: str


@dataclass(frozen=True, slots=True)
class FailedTorn:
    """The refit failed after live bytes may have changed, or could not be undone: the commit is revoked."""

    slug: str


@dataclass(frozen=True, slots=True)
class DriftFound:
    """Live weights are no longer what was proven at their commit: the commit is revoked."""

    slug: str


@dataclass(frozen=True, slots=True)
class SleepAsked:
    """Give memory back. Level 1 keeps the weights (in host memory), level 2 discards them.

    `policy` is what happens to requests in flight; none can keep its KV cache through a sleep.
    """

    level: int
    policy: Literal["recompute", "wait", "abort"] = "recompute"


@dataclass(frozen=True, slots=True)
class WokenWhole:
    """Awake with the weights that were committed before the sleep."""


@dataclass(frozen=True, slots=True)
class WokenEmpty:
    """Awake without weights; the KV cache stays asleep until a refit resumes the engine."""


@dataclass(frozen=True, slots=True)
class Died:
    """The engine process is gone, or was given up."""

    slug: str


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """Boot a new incarnation."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """End for good."""


Event = (
    BootedWith | BootedEmpty | RefitOffered | DeltaOffered | Suspended | WeightsLanded | Finalized | Resumed
    | FailedClean | FailedUncommitted | FailedQuarantined | FailedTorn | DriftFound
    | SleepAsked | WokenWhole | WokenEmpty | Died | RestartAsked | StopAsked
)  # fmt: skip

P = Phase
_LIVE: Final = tuple(p for p in Phase if p not in (P.DEAD, P.STOPPED))

TABLE: Final[Mapping[tuple[Phase, type[Event]], tuple[Phase, Do]]] = MappingProxyType({
    (P.STARTING, BootedWith): (P.SERVING, Do.ADMIT),
    (P.STARTING, BootedEmpty): (P.IDLE, Do.REST),
    (P.SERVING, RefitOffered): (P.SUSPENDING, Do.SUSPEND),
    (P.SERVING, DeltaOffered): (P.SUSPENDING, Do.SUSPEND),
    (P.IDLE, RefitOffered): (P.RECEIVING, Do.RECEIVE),
    (P.QUARANTINED, RefitOffered): (P.RECEIVING, Do.RECEIVE),
    (P.SUSPENDING, Suspended): (P.RECEIVING, Do.RECEIVE),
    (P.RECEIVING, WeightsLanded): (P.FINALIZING, Do.FINALIZE),
    (P.FINALIZING, Finalized): (P.RESUMING, Do.COMMIT),
    (P.RESUMING, Resumed): (P.SERVING, Do.ADMIT),
    (P.SUSPENDING, FailedClean): (P.RESUMING, Do.RELEASE),
    (P.RECEIVING, FailedClean): (P.RESUMING, Do.RELEASE),
    (P.RECEIVING, FailedUncommitted): (P.IDLE, Do.REST),
    (P.RECEIVING, FailedQuarantined): (P.QUARANTINED, Do.REST),
    (P.RECEIVING, FailedTorn): (P.QUARANTINED, Do.REVOKE),
    (P.FINALIZING, FailedTorn): (P.QUARANTINED, Do.REVOKE),
    (P.RESUMING, FailedTorn): (P.QUARANTINED, Do.REVOKE),
    (P.SERVING, DriftFound): (P.QUARANTINED, Do.PARK),
    (P.SERVING, SleepAsked): (P.SLEEPING, Do.SLEEP),
    (P.IDLE, SleepAsked): (P.SLEEPING, Do.SLEEP),
    (P.SLEEPING, WokenWhole): (P.RESUMING, Do.WAKE),
    (P.SLEEPING, WokenEmpty): (P.IDLE, Do.REST),
    (P.DEAD, RestartAsked): (P.STARTING, Do.BOOT),
    (P.DEAD, StopAsked): (P.STOPPED, Do.STOP),
    **{(p, Died): (P.DEAD, Do.BURY) for p in _LIVE},
    **{(p, StopAsked): (P.STOPPED, Do.STOP) for p in _LIVE},
})  # fmt: skip


def advance(phase: Phase, event: Event) -> tuple[Phase, Do]:
    """Return the next phase and what to do on the way in.

    Raises:
        IllegalEvent: the table has no such pair; the phase is unchanged.
    """
    try:
        return TABLE[phase, type(event)]
    except KeyError:
        raise IllegalEvent(
            f"{type(event).__name__} cannot happen while {phase.value}", phase=phase.value, event=type(event).__name__
        ) from None
