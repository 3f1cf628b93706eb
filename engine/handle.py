"""A refit under way, as its caller sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from typing import Any

from pitstop.engine.errors import PitstopError, RefitFailed
from pitstop.engine.refit import Outcome, RefitReport, ReplicaReport

log = logging.getLogger("pitstop.engine")


class Milestone:
    """Something that happens once, or turns out never to. Wait for it from the engine's event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._error: PitstopError | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._event.is_set() and self._error is None

    async def wait(self) -> None:
        """Return when it has happened.

        Raises:
            PitstopError: what made it impossible.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error

    def reached(self, error: PitstopError | None = None) -> None:
        """It has happened, or never will. Later calls change nothing."""
        if not self._event.is_set():
            self._error = error
            self._event.set()


class RefitHandle:
    """Returned at once by `refit`. Await it for the report.

    Attributes:
        sent: reached when the source is free again and may change.
        report: None until the refit has ended.
    """

    def __init__(self, refit_id: str, weight_version: int) -> None:
        self.refit_id = refit_id
        self.weight_version = weight_version
        self.sent = Milestone()
        self.report: RefitReport | None = None
        self._over = asyncio.Event()
        self._replicas: dict[str, asyncio.Future[ReplicaReport]] = {}

    def __repr__(self) -> str:
        how = self.report.outcome.value if self.report else "under way"
        return f"<RefitHandle {self.refit_id} v{self.weight_version} {how}>"

    def done(self) -> bool:
        """Whether the refit has ended."""
        return self._over.is_set()

    async def committed(self, replica: str) -> ReplicaReport:
        """Wait until `replica` serves the version.

        Raises:
            PitstopError: what kept it from that.
            KeyError: the refit ended without such a replica.
        """
        future = self._replicas.setdefault(replica, asyncio.get_running_loop().create_future())
        if not self._over.is_set():
            await asyncio.wait({future})
        if future.cancelled() or not future.done():
            self._raise_failed()
            raise KeyError(replica)
        report = future.result()
        if not report.committed:
            raise report.error or RefitFailed(f"{replica} did not take version {self.weight_version}")
        return report

    def __await__(self) -> Generator[Any, None, RefitReport]:
        return self._result().__await__()

    async def _result(self) -> RefitReport:
        await self._over.wait()
        self._raise_failed()
        assert self.report is not None
        return self.report

    def _raise_failed(self) -> None:
        report = self.report
        if report is not None and report.outcome is Outcome.FAILED:
            raise report.error or RefitFailed(f"no replica took version {self.weight_version}")

    def replica_done(self, report: ReplicaReport) -> None:
        """One replica has ended its part. Called by the coordinator."""
        future = self._replicas.setdefault(report.replica, asyncio.get_running_loop().create_future())
        if not future.done():
            future.set_result(report)

    def end(self, report: RefitReport) -> None:
        """The refit has ended. Called by the coordinator, once."""
        self.report = report
        # A superseded source was never read to the end, and may change all the same: nobody will read it.
        self.sent.reached(report.error)
        for part in report.replicas.values():
            self.replica_done(part)
        for future in self._replicas.values():
            future.cancel()
        if report.outcome in (Outcome.FAILED, Outcome.PARTIAL):
            why = report.error or next((r.error for r in report.replicas.values() if r.error), None)
            log.warning("refit to version %s %s: %s", self.weight_version, report.outcome.value, why)
        self._over.set()
