"""Limits on waiting. The clock is a parameter, so that tests need no sleep."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

from pitstop.engine.errors import DeadlineExceeded, PeerLost

Clock = Callable[[], float]

BEAT_S: Final = 0.5
"""Seconds between two beats of a link, each way."""

SILENCE_S: Final = 5.0
"""Seconds that a peer may say nothing, where a refit does not say otherwise."""


class Limit:
    """A stretch of time that something has to end in."""

    def __init__(self, seconds: float, clock: Clock = monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - self._clock())

    def check(self, what: str, **facts: str | int) -> None:
        """Raise `DeadlineExceeded`, naming `what`, if the time is over."""
        if self._clock() >= self._end:
            raise DeadlineExceeded(f"{what} took longer than {self.seconds:g} s", seconds=self.seconds, **facts)


class Silence:
    """How long a peer has said nothing."""

    def __init__(self, seconds: float, clock: Clock = monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._heard = clock()

    def heard(self) -> None:
        """The peer said something."""
        self._heard = self._clock()

    def check(self, peer: str, seconds: float | None = None) -> None:
        """Raise `PeerLost`, naming `peer`, if it has been silent for longer than it may, or than `seconds`."""
        limit = self.seconds if seconds is None else seconds
        if self._clock() - self._heard > limit:
            raise PeerLost(f"{peer} said nothing for {limit:g} s", peer=peer, seconds=limit)
