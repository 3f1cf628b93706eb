"""How fast a version may go into spare memory while the replica serves. Pure; the time is an argument.

Copies go through the memory that the model reads its weights from, token by token: flat out they leave it a twentieth
of its rate. Whoever would come too late by going at that pace goes faster.
"""

from __future__ import annotations

from typing import Final

PIECE_NBYTES: Final = 64 << 20
"""Bytes that are copied without a pause: less than a tenth of a millisecond on a GPU, where a step takes several.

Smaller ones cost more: for each a thread wakes up and takes Python's lock from the one that has the model step.
"""

_SAVED: Final = 2  # pieces that may follow each other at once, where a thread woke up late


class Throttle:
    """A token bucket over the bytes of one version; it yields to `until`, a time at which all should have gone.

    Ask `wait` before each piece of at most `PIECE_NBYTES`, say `spend` when it goes. None for a rate: no waits.
    """

    def __init__(self, nbytes: int, nbytes_per_s: int | None, now: float, until: float) -> None:
        self._left = nbytes
        self._rate = nbytes_per_s
        self._until = until
        self._due = now

    def wait(self, now: float) -> float:
        """Return for how many seconds the next piece has to wait, 0.0 if it may go now."""
        return 0.0 if self._rate is None else max(0.0, self._due - now)

    def spend(self, nbytes: int, now: float) -> None:
        """So many bytes go now."""
        if self._rate is not None:
            behind = now - _SAVED * PIECE_NBYTES / self._rate
            share = nbytes / max(self._left, nbytes, 1)
            seconds = min(nbytes / self._rate, share * max(0.0, self._until - now))
            self._due = max(self._due, behind) + seconds
        self._left -= nbytes
