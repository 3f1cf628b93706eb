"""How a replica's drafter does under each version. Its output stays right when it falls behind, and becomes slow."""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from pitstop.engine.counters import Acceptance, Counters
from pitstop.engine.errors import PitstopError
from pitstop.engine.job import bounded
from pitstop.engine.ports import Backend, Observer
from pitstop.engine.refit import Deadlines

log = logging.getLogger("pitstop.engine")

ENOUGH: Final = 200
"""Drafts from which on a version's acceptance is judged."""
DROP: Final = 0.25
"""The part of the best acceptance so far whose loss is an event. A drafter that is never refitted loses a little with
each version, so the version before would be no measure."""


class Drafting:
    """Watches one replica. Costs an engine without a drafter one look at its counters for each version."""

    def __init__(self, name: str, backend: Backend, observer: Observer) -> None:
        self._name, self._backend, self._observer = name, backend, observer
        self._since: Counters | None = None
        self._version: int | None = None
        self._best = 0.0
        self._judged = False

    async def began(self, weight_version: int) -> None:
        """The replica serves a version from now on."""
        self._since, self._version, self._judged = None, weight_version, False
        counters = await self._counters()
        if counters is not None and counters.acceptance() is not None:
            self._since = counters

    async def look(self) -> Acceptance | None:
        """Return how drafts have fared under the present version; judge that once there are enough of them."""
        since = self._since
        if since is None or (counters := await self._counters()) is None or self._since is not since:
            return None  # the last: the version went while they were asked for
        found = counters.since(since).acceptance()
        if found is not None and found.drafts >= ENOUGH and not self._judged:
            self._judge(found)
        return found

    async def ended(self) -> Acceptance | None:
        """The replica is about to leave the version; return how drafts fared under it, None if there were none."""
        found = await self.look()
        self._since = None
        if found is None or not found.drafts:
            return None
        self._observer.counted("rl.drafter.acceptance", found.rate)
        if found.drafts >= ENOUGH:
            self._best = max(self._best, found.rate)
        return found

    def _judge(self, found: Acceptance) -> None:
        self._judged = True
        if found.rate < self._best * (1 - DROP):
            log.warning(
                "%s: under version %s %.0f %% of its drafter's tokens are accepted, after %.0f %% at best: "
                "if the drafter is trained, publish it too",
                self._name, self._version, 100 * found.rate, 100 * self._best,
            )  # fmt: skip
            self._observer.counted("rl.drafter.drops", 1)
            # Said once: the next event is a further loss.
            self._best = found.rate

    async def _counters(self) -> Counters | None:
        # What only tells how fast it is must not fail a refit.
        with contextlib.suppress(PitstopError):
            limit = Deadlines().control
            return await bounded(self._backend.counters(), limit, replica=self._name, phase="count")
        return None
