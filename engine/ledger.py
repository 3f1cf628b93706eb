"""The ledger: which version each replica has proven, for which incarnation of it.

A gate opens only with a `Commit` in hand, and only the ledger makes them: that is how "a replica serves proven
weights only" is a fact about types rather than a habit of the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from pitstop.engine.errors import IllegalEvent


@dataclass(frozen=True, slots=True)
class Commit:
    """Replica `replica`, in its `incarnation`-th life, holds `weight_version`, whole and proven."""

    replica: str
    incarnation: int
    weight_version: int


class Ledger:
    """Commits of a fleet. Not thread-safe: one owner, the fleet's event loop."""

    def __init__(self) -> None:
        self._incarnations: dict[str, int] = {}
        self._commits: dict[str, Commit] = {}

    def born(self, replica: str) -> int:
        """Begin a new incarnation of `replica`, which has committed nothing, and return its number from 1."""
        self._commits.pop(replica, None)
        self._incarnations[replica] = self._incarnations.get(replica, 0) + 1
        return self._incarnations[replica]

    def commit(self, replica: str, incarnation: int, weight_version: int) -> Commit:
        """Record a proven version.

        Raises:
            IllegalEvent: the incarnation is not the living one, so whatever was proven is gone.
        """
        if self._incarnations.get(replica) != incarnation:
            raise IllegalEvent(
                f"incarnation {incarnation} of {replica} is not the living one", replica=replica, event="commit"
            )
        self._commits[replica] = commit = Commit(replica, incarnation, weight_version)
        return commit

    def revoke(self, replica: str) -> None:
        """Forget what `replica` had proven. Idempotent."""
        self._commits.pop(replica, None)

    def committed(self, replica: str) -> Commit | None:
        """Return what `replica` has proven in its present life, if anything."""
        return self._commits.get(replica)

    @property
    def oldest(self) -> int | None:
        """The lowest committed version of the fleet."""
        return min((c.weight_version for c in self._commits.values()), default=None)
