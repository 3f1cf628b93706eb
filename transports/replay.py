"""A version that still lies in shared memory, delivered once more without its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pitstop.engine.errors import OfferRejected
from pitstop.engine.ports import Ring
from pitstop.engine.refit import RefitReport
from pitstop.engine.worker_ports import Manifest, Offer, Ticket, Trailer


class Replay:
    """Implements `ports.Sending`. Writes nothing: receivers prove what lies there against the same digests."""

    transport = "shared_memory"

    def __init__(self, offer: Offer, manifest: Manifest, digests: tuple[int, ...]) -> None:
        self.offer = offer
        self._manifest = manifest
        self._digests = digests

    def renamed(self, refit_id: str) -> Replay:
        """Return the same delivery under another refit id, and out of the trace that it came in."""
        return Replay(replace(self.offer, refit_id=refit_id, headers={}), self._manifest, self._digests)

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        """See `Sending.send`.

        Raises:
            OfferRejected: the model wants something else than what lies there.
        """
        if manifest != self._manifest:
            raise OfferRejected(f"version {self.offer.weight_version} lies in memory in another form than is wanted")
        return Trailer(self.offer.refit_id, self._digests)

    async def settled(self, report: RefitReport) -> None:
        """See `Sending.settled`. Nobody waits for it."""
