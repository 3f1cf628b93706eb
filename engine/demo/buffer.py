"""Rollouts between the replicas and the trainer, and how many more may be started: pure.

No rollout is trained on that is more than `max_staleness` versions older than the weights it changes. Admission makes
that so in the common case: at version v, no more groups are started than steps up to v + max_staleness can use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pitstop.engine.demo.grpo import Group


@dataclass(frozen=True, slots=True)
class Rollout:
    """One problem's answers. `weight_version` is that of the oldest weights that made a token of them."""

    group: Group
    weight_version: int
    texts: Sequence[str] = ()
    crossed: int = 0

    @property
    def rewards(self) -> list[float]:
        """The reward of each answer."""
        return [answer.reward for answer in self.group.answers]


class RolloutBuffer:
    """Counts groups in flight, keeps finished ones, hands out batches of them, `total` groups in all.

    Attributes:
        in_flight: groups at the replicas.
        stale: groups thrown away.
    """

    def __init__(self, batch: int, max_staleness: int, *, total: int) -> None:
        self.batch, self.max_staleness, self.total = batch, max_staleness, total
        self.in_flight = 0
        self.stale = 0
        self._taken = 0
        self._ready: deque[Rollout] = deque()

    def __len__(self) -> int:
        return len(self._ready)

    def room(self, version: int) -> int:
        """How many groups may be started while the replicas serve `version`."""
        usable = min(self.total, (version + self.max_staleness + 1) * self.batch)
        return max(0, usable - self._taken - len(self._ready) - self.in_flight)

    def started(self) -> None:
        """A group was handed to the replicas."""
        self.in_flight += 1

    def failed(self) -> None:
        """A group ended without answers to train on; its place is free again."""
        self.in_flight -= 1

    def finished(self, rollout: Rollout) -> None:
        """A group has all its answers."""
        self.in_flight -= 1
        self._ready.append(rollout)

    def take(self, version: int) -> list[Rollout] | None:
        """Return the batch that the step from `version` to the next trains on, once there are enough of them."""
        fresh = [rollout for rollout in self._ready if version - rollout.weight_version <= self.max_staleness]
        self.stale += len(self._ready) - len(fresh)
        self._ready = deque(fresh)
        if len(fresh) < self.batch:
            return None
        self._taken += self.batch
        return [self._ready.popleft() for _ in range(self.batch)]
