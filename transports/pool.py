"""Which segment a refit uses: the last one again if nobody can still touch it, a fresh one otherwise."""

from __future__ import annotations

from threading import Lock
from typing import Final

from pitstop.engine.errors import EngineClosed, OfferRejected
from pitstop.transports.memory import HEADROOM, available
from pitstop.transports.segment import Segment

WRITING: Final[set[str]] = set()
"""Refits whose sender may be writing. Added to and taken from by whoever drives a sender in this process."""

_GIB: Final = 1 << 30


class Lease:
    """One refit's hold on a segment. `readers` are those that may be looking into it."""

    def __init__(self, refit_id: str, segment: Segment) -> None:
        self.refit_id = refit_id
        self.segment = segment
        self.readers: set[str] = set()
        self.over = False

    @property
    def free(self) -> bool:
        """Whether nobody reads or writes the segment, for all time and not just for now."""
        return self.over and not self.readers and self.refit_id not in WRITING


class SegmentPool:
    """The segments of one fleet: as a rule one, that every refit uses. Thread-safe.

    No lock is held while memory is let go of, which takes its time.
    """

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self._lock = Lock()
        self._closed = False

    def take(self, refit_id: str, nbytes: int) -> Lease:
        """Return a lease of a segment of at least `nbytes`.

        Raises:
            OfferRejected: there is no memory for it.
            EngineClosed: the pool was closed.
        """
        done_with: list[Segment] = []
        with self._lock:
            lease = self._again(refit_id, nbytes, done_with)
        for segment in done_with:
            segment.close()
        return lease or self._leased(refit_id, self._fresh(nbytes))

    def again(self, refit_id: str, lease: Lease) -> Lease | None:
        """Return another lease of the same segment, for somebody who only reads; None if it is used otherwise now."""
        with self._lock:
            if lease not in self._leases:
                return None
            another = Lease(refit_id, lease.segment)
            self._leases.append(another)
            return another

    def reusable(self) -> int:
        """Return the bytes of the largest segment that `take` would use again, or let go of for a larger one."""
        with self._lock:
            segments = {lease.segment for lease in self._leases}
            over = [s for s in segments if all(lease.over for lease in self._leases if lease.segment is s)]
            return max((segment.nbytes for segment in over), default=0)

    def holds(self, lease: Lease) -> bool:
        """Whether a lease's segment still has what was written under it."""
        with self._lock:
            return lease in self._leases

    def close(self) -> None:
        """Let go of every segment, and of one that is just being made. Idempotent."""
        with self._lock:
            self._closed = True
            leases, self._leases = self._leases, []
        for lease in leases:
            lease.segment.close()

    def _again(self, refit_id: str, nbytes: int, done_with: list[Segment]) -> Lease | None:
        usable = None
        for segment in {lease.segment for lease in self._leases}:
            holders = [lease for lease in self._leases if lease.segment is segment]
            if not all(lease.over for lease in holders):
                continue
            self._leases = [lease for lease in self._leases if lease.segment is not segment]
            if usable is None and all(lease.free for lease in holders) and segment.nbytes >= nbytes:
                usable = segment
            else:
                done_with.append(segment)
        if usable is None:
            return None
        lease = Lease(refit_id, usable)
        self._leases.append(lease)
        return lease

    def _leased(self, refit_id: str, segment: Segment) -> Lease:
        lease = Lease(refit_id, segment)
        with self._lock:
            if not self._closed:
                self._leases.append(lease)
                return lease
        segment.close()
        raise EngineClosed("the engine was closed while its memory was made ready")

    @staticmethod
    def _fresh(nbytes: int) -> Segment:
        free, whose = available()
        if nbytes + HEADROOM > free:
            raise OfferRejected(
                f"the refit needs {nbytes / _GIB:.2f} GiB of shared memory and {HEADROOM / _GIB:.2f} GiB of headroom, "
                f"but only {free / _GIB:.2f} GiB can be had (limit of {whose})",
                nbytes=nbytes,
                available=free,
            )
        try:
            return Segment(nbytes)
        except OSError as error:
            raise OfferRejected(
                f"no shared memory segment of {nbytes} bytes: {error.strerror}", nbytes=nbytes
            ) from None
