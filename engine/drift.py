"""What was in a replica's live weights at its commit, and what is there now: records and their comparison.

An engine's own layout (fused, sharded, converted) cannot be predicted from what a trainer sent, so it is read once
after each commit. Later readings must give the same: who serves from memory that has changed since serves unproven
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pitstop.engine.errors import WeightsDrifted, names
from pitstop.engine.ledger import Commit
from pitstop.engine.worker_ports import Seen, WorkerReply


class Drifted(NamedTuple):
    """A tensor of one rank that is not what it was at the commit."""

    rank: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Fingerprints of each rank's tensors, as they were read, and how much of the model that is."""

    tensors: Mapping[int, Mapping[str, str]]
    seen: Mapping[int, Seen]

    @classmethod
    def of(cls, replies: Sequence[WorkerReply]) -> Reading:
        """Put the ranks' answers together."""
        return cls(
            {reply.rank: reply.fingerprint or {} for reply in replies},
            {reply.rank: reply.seen or Seen() for reply in replies},
        )

    def differing(self, other: Reading) -> tuple[Drifted, ...]:
        """Name what is not the same, or not there, in the other."""
        return tuple(
            Drifted(rank, name)
            for rank in sorted(self.tensors.keys() | other.tensors.keys())
            for name in sorted(self.tensors.get(rank, {}).keys() | other.tensors.get(rank, {}).keys())
            if self.tensors.get(rank, {}).get(name) != other.tensors.get(rank, {}).get(name)
        )


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """What a verification found on one replica.

    `unknown`: there was nothing to compare, for the reason in `why`. `tensors` and `nbytes` were compared, all ranks
    counted; `checkpoint_nbytes` is what the whole checkpoint has. `blind` and `left_out` say what a comparison cannot
    see, each name as `rank:name`: parameters that the engine has packed away, and tensors that change as it serves.
    """

    replica: str
    state: Literal["same", "drifted", "unknown"]
    weight_version: int | None = None
    why: str = ""
    drifted: tuple[Drifted, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    checkpoint_nbytes: int = 0
    blind: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def error(self) -> WeightsDrifted:
        """Say what drifted, and what to do."""
        first = self.drifted[0]
        named = names([f"{name} (rank {rank})" for rank, name in self.drifted])
        return WeightsDrifted(
            f"{self.replica}: {len(self.drifted)} live tensors are not what version {self.weight_version} was at its "
            f"commit: {named}. It is quarantined; `recover()` or a full refit brings it back",
            replica=self.replica, rank=first.rank, tensor=first.tensor, count=len(self.drifted),
            weight_version=self.weight_version,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found, by replica."""

    replicas: Mapping[str, ReplicaCheck]

    @property
    def drifted(self) -> tuple[ReplicaCheck, ...]:
        """Replicas whose weights are not their version's."""
        return tuple(check for check in self.replicas.values() if check.state == "drifted")

    @property
    def unknown(self) -> tuple[ReplicaCheck, ...]:
        """Replicas of which nothing could be said."""
        return tuple(check for check in self.replicas.values() if check.state == "unknown")


class Remembered:
    """The reading of each replica's present commit. One that belongs to another commit counts for nothing."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Commit, Reading]] = {}
        self._missed: dict[str, tuple[Commit, str]] = {}

    def keep(self, commit: Commit, reading: Reading) -> None:
        """Remember what a commit's weights are."""
        self._kept[commit.replica] = (commit, reading)

    def miss(self, commit: Commit, why: str) -> None:
        """Remember why they could not be read."""
        self._missed[commit.replica] = (commit, why)

    def of(self, commit: Commit) -> Reading | None:
        """Return what they are, if it was read."""
        kept = self._kept.get(commit.replica)
        return kept[1] if kept is not None and kept[0] == commit else None

    def why_not(self, commit: Commit) -> str | None:
        """Return why they could not be read, if it was tried."""
        missed = self._missed.get(commit.replica)
        return missed[1] if missed is not None and missed[0] == commit else None


def compared(commit: Commit, before: Reading, now: Reading, checkpoint_nbytes: int) -> ReplicaCheck:
    """Compare two readings of one commit."""
    drifted = before.differing(now)
    return ReplicaCheck(
        commit.replica,
        "drifted" if drifted else "same",
        commit.weight_version,
        drifted=drifted,
        tensors=sum(len(found) for found in now.tensors.values()),
        nbytes=sum(seen.nbytes for seen in now.seen.values()),
        checkpoint_nbytes=checkpoint_nbytes,
        blind=tuple(f"{rank}:{name}" for rank, seen in sorted(now.seen.items()) for name in seen.blind),
        left_out={f"{rank}:{name}": why for rank, seen in now.seen.items() for name, why in seen.left_out.items()},
    )
