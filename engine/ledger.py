"""The ledger: which version each replica has proven, for which incarnation of it.

A gate opens only with a `Commit` in hand, and only the ledger makes them: that is how "a replica serves proven
weights only" is a fact about types rather than a habit of the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from pitstop.engine.errors import IllegalEvent


class Place(NamedTuple):
    """Where a version stands in the fleet's history: `number` grows with every newer version, whatever it is called.

    Numbers and versions keep the same distance until a rebase, which is one step whatever version it begins with.
    So numbers say which of two versions is newer, and by how much, where versions alone would count backwards.
    """

    number: int
    weight_version: int

    @classmethod
    def first(cls, weight_version: int) -> Self:
        """Return the place of a version before any rebase."""
        return cls(weight_version, weight_version)

    def later(self, weight_version: int) -> Self:
        """Return the place of another version of the same count."""
        return type(self)(self.number + weight_version - self.weight_version, weight_version)

    def rebased(self, weight_version: int) -> Self:
        """Return the place of a version that begins a new count."""
        return type(self)(self.number + 1, weight_version)


_START: Final = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Commit:
    """Replica `replica`, in its `incarnation`-th life, holds `weight_version`, whole and proven.

    `number` is another for every commit of a fleet: what is derived from it belongs to these weights alone.
    """

    replica: str
    incarnation: int
    weight_version: int
    place: Place = _START
    number: int = 0


class Ledger:
    """Commits of a fleet. Not thread-safe: one owner, the fleet's event loop."""

    def __init__(self) -> None:
        self._incarnations: dict[str, int] = {}
        self._commits: dict[str, Commit] = {}
        self._number = 0
        self._newest: Place | None = None

    def born(self, replica: str) -> int:
        """Begin a new incarnation of `replica`, which has committed nothing, and return its number from 1."""
        self._commits.pop(replica, None)
        self._incarnations[replica] = self._incarnations.get(replica, 0) + 1
        return self._incarnations[replica]

    def commit(self, replica: str, incarnation: int, weight_version: int, place: Place | None = None) -> Commit:
        """Record a proven version, which stands where it was counted if not said otherwise.

        Raises:
            IllegalEvent: the incarnation is not the living one, so whatever was proven is gone.
        """
        if self._incarnations.get(replica) != incarnation:
            raise IllegalEvent(
                f"incarnation {incarnation} of {replica} is not the living one", replica=replica, event="commit"
            )
        place = place or Place.first(weight_version)
        self._number += 1
        self._commits[replica] = commit = Commit(replica, incarnation, weight_version, place, self._number)
        self._newest = max(self._newest or place, place)
        return commit

    def revoke(self, replica: str) -> None:
        """Forget what `replica` had proven. Idempotent."""
        self._commits.pop(replica, None)

    def committed(self, replica: str) -> Commit | None:
        """Return what `replica` has proven in its present life, if anything."""
        return self._commits.get(replica)

    @property
    def oldest(self) -> int | None:
        """The oldest committed version of the fleet."""
        place = min((c.place for c in self._commits.values()), default=None)
        return place.weight_version if place is not None else None

    @property
    def newest(self) -> Place | None:
        """Where the newest version stands that was ever committed."""
        return self._newest
