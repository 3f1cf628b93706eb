"""Admission to one replica. A gate opens only with a `Commit` in hand, so unproven weights admit nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from pitstop.engine.errors import NotServing
from pitstop.engine.ledger import Commit


class Gate:
    """Open or closed, with leases.

    A lease is held from the decision to use a replica until its engine has accepted the request. Closing stops
    new leases at once; `drained` waits for those that are out. So once a closed gate is drained, no request can
    still be on its way into the engine: the check and the submit are one step.
    """

    def __init__(self) -> None:
        self._commit: Commit | None = None
        self._leases = 0
        self._none_out = asyncio.Event()
        self._none_out.set()

    @property
    def commit(self) -> Commit | None:
        """What admitted requests start under; None while closed."""
        return self._commit

    @property
    def leases(self) -> int:
        """Requests on their way in."""
        return self._leases

    def open(self, commit: Commit) -> None:
        """Admit requests under `commit`."""
        self._commit = commit

    def close(self) -> None:
        """Admit no more. Idempotent."""
        self._commit = None

    @contextlib.contextmanager
    def lease(self) -> Iterator[Commit]:
        """Hold a place on the way in.

        Raises:
            NotServing: the gate is closed.
        """
        if self._commit is None:
            raise NotServing("the gate is closed")
        self._leases += 1
        self._none_out.clear()
        try:
            yield self._commit
        finally:
            self._leases -= 1
            if not self._leases:
                self._none_out.set()

    async def drained(self) -> None:
        """Wait until no lease is out."""
        await self._none_out.wait()
