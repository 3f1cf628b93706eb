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
        for lease in [lease for lease in self._leases if lease.over]:
            self._leases.remove(lease)
            if usable is None and lease.free and lease.segment.nbytes >= nbytes:
                usable = lease.segment
            else:
                lease.segment.close()
        segment = usable or self._fresh(nbytes)
        lease = Lease(refit_id, segment)
        self._leases.append(lease)
        return lease

    def close(self) -> None:
        """Let go of every segment. Idempotent."""
        for lease in self._leases:
            lease.segment.close()
        self._leases.clear()

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
