"""Which segment a refit uses: the last one again if nobody can still touch it, a fresh one otherwise."""

from __future__ import annotations

from typing import Final

from pitstop.engine.errors import OfferRejected
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
    """The segments of one fleet: as a rule one, that every refit uses."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []

    def take(self, refit_id: str, nbytes: int) -> Lease:
        """Return a lease of a segment of at least `nbytes`.

        Raises:
            OfferRejected: there is no memory for it.
        """
        usable = None
        for segment in {lease.segment for lease in self._leases}:
            holders = [lease for lease in self._leases if lease.segment is segment]
            if not all(lease.over for lease in holders):
                continue
            self._leases = [lease for lease in self._leases if lease.segment is not segment]
            if usable is None and all(lease.free for lease in holders) and segment.nbytes >= nbytes:
                usable = segment
            else:
                segment.close()
        return self._leased(refit_id, usable or self._fresh(nbytes))

    def again(self, refit_id: str, lease: Lease) -> Lease | None:
        """Return another lease of the same segment, for somebody who only reads; None if it is used otherwise now."""
        return self._leased(refit_id, lease.segment) if self.holds(lease) else None

    def holds(self, lease: Lease) -> bool:
        """Whether a lease's segment still has what was written under it."""
        return lease in self._leases

    def close(self) -> None:
        """Let go of every segment. Idempotent."""
        for lease in self._leases:
            lease.segment.close()
        self._leases.clear()

    def _leased(self, refit_id: str, segment: Segment) -> Lease:
        lease = Lease(refit_id, segment)
        self._leases.append(lease)
        return lease

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
