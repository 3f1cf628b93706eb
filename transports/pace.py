"""How far the writer and the readers of one ring are. Pure; the clock is a parameter."""

from __future__ import annotations

from time import monotonic
from typing import Final

from pitstop.engine.errors import ProtocolViolation
from pitstop.transports.deadline import Clock

_SILENCES: Final = 6
_SHARE: Final = 3


def patience(receive_s: float, silence_s: float) -> float:
    """Return how many seconds a reader may take over one bucket before it is evicted.

    Several silences, since what it does meanwhile is work; and a part of the time that all have, so that the others
    can still land after it.
    """
    return max(silence_s, min(_SILENCES * silence_s, receive_s / _SHARE))


class Pace:
    """Counts buckets, from the first on: what was filled, and what each reader has drained.

    A slot is used again when every reader that is still in has drained it. Whoever comes when writing has begun has
    missed buckets, and is refused.

    Attributes:
        filled: buckets written.
        drained: buckets that every reader is done with. Stays where it is when nobody reads any more.
    """

    def __init__(self, buckets: int, slots: int, clock: Clock = monotonic) -> None:
        self.buckets: Final = buckets
        self.slots: Final = slots
        self.filled = 0
        self.drained = 0
        self._readers: dict[str, int] = {}
        self._moved: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self._clock = clock
        self._looked = clock()

    def join(self, reader: str) -> None:
        """A reader is ready.

        Raises:
            ProtocolViolation: the first bucket has been written.
        """
        if self.filled:
            raise ProtocolViolation(f"{reader} came when {self.filled} of {self.buckets} buckets had been written")
        self._readers[reader] = 0

    def leave(self, reader: str) -> bool:
        """A reader has ended, or no longer counts. Return whether `drained` has grown by it."""
        self._book()
        self._readers.pop(reader, None)
        return self._settle()

    def fill(self, buckets: int) -> None:
        """The writer has written so many.

        Raises:
            ProtocolViolation: more than there are or than there is room for, or fewer than before.
        """
        if not self.filled <= buckets <= min(self.buckets, self.drained + self.slots):
            raise ProtocolViolation(
                f"{buckets} of {self.buckets} buckets written, after {self.filled}, "
                f"with {self.drained} drained of {self.slots} slots"
            )
        self._book()
        now = self._clock()
        for reader, drained in self._readers.items():
            if drained == self.filled:
                self._moved[reader] = now
        self.filled = buckets

    def drain(self, reader: str, buckets: int) -> bool:
        """A reader is done with so many. Return whether `drained` has grown by it.

        Raises:
            ProtocolViolation: more than were written, or fewer than before.
        """
        if reader not in self._readers:
            return False  # it was evicted, and does not know yet
        if not self._readers[reader] <= buckets <= self.filled:
            raise ProtocolViolation(
                f"{reader} drained {buckets} of {self.filled} buckets, {self._readers[reader]} before"
            )
        self._book()
        if buckets > self._readers[reader]:  # who says the same again and again has not moved
            self._moved[reader] = self._clock()
        self._readers[reader] = buckets
        return self._settle()

    def overdue(self, seconds: float) -> list[str]:
        """Name the readers that have had a bucket before them for longer than `seconds`."""
        now = self._clock()
        return [
            reader
            for reader, drained in self._readers.items()
            if drained < self.filled and now - self._moved[reader] > seconds
        ]

    def holding(self, seconds: float) -> list[str]:
        """Name the readers for which others have waited longer than `seconds` in all, with nothing else to do."""
        self._book()
        return [reader for reader in self._readers if self._held.get(reader, 0.0) > seconds]

    def _book(self) -> None:
        """Add the time since the last look to whoever holds the others up: the slowest, where no slot is free."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        full = self.filled == self.drained + self.slots < self.buckets
        if full and any(drained == self.filled for drained in self._readers.values()):
            for reader, drained in self._readers.items():
                if drained == self.drained:
                    self._held[reader] = self._held.get(reader, 0.0) + passed

    def _settle(self) -> bool:
        before, self.drained = self.drained, min(self._readers.values(), default=self.drained)
        return self.drained > before
