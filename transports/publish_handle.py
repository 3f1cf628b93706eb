"""A publish under way, as the trainer sees it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from pitstop.engine.errors import PitstopError, ProtocolViolation, RefitFailed
from pitstop.engine.ports import Observer, Scalar, Work
from pitstop.engine.refit import Outcome, RefitReport
from pitstop.engine.worker_ports import Offer
from pitstop.transports.messages import Settled
from pitstop.transports.packing import Source
from pitstop.transports.reports import reported

_DONE: Final[Future[None]] = Future()
_DONE.set_result(None)


class PublishHandle:
    """Returned at once by `publish`. `result` blocks; `await handle` works on any asyncio loop.

    Attributes:
        sent: set when the source is free again: everything was sent, or nothing more of it will be read.
        refit_id: the refit's name in reports, logs and traces.
        weight_version: the version that was offered.
    """

    def __init__(
        self,
        offer: Offer,
        source: Source,
        policy: str | None,
        deadlines: dict[str, float],
        *,
        rebase: bool = False,
        mode: str | None = None,
    ) -> None:
        self.refit_id: Final = offer.refit_id
        self.weight_version: Final = offer.weight_version
        self.sent: Final = threading.Event()
        self.offer = offer
        self.source: Source | None = source
        self.policy: Final = policy
        self.deadlines: Final = deadlines
        self.rebase: Final = rebase
        self.mode: Final = mode
        self.key: Final = f"send_weights:{offer.refit_id}"
        self.since: Final = monotonic()
        self.offered = False
        self.kernels: Future[None] = _DONE  #: what it takes to read the source
        self.number = 0  #: its publisher's how-manieth it is
        self.drained = 0  #: buckets of its ring that every receiver is done with
        self.cancelled: PitstopError | None = None
        self.publisher: object = None  #: kept from being collected until the refit has ended
        self._observer: Observer | None = None
        self._free: Future[None] = Future()
        self._free.set_running_or_notify_cancel()
        self._future: Future[RefitReport] = Future()
        # Whoever stops waiting for it does not stop it.
        self._future.set_running_or_notify_cancel()

    async def until_sent(self) -> None:
        """Return when the source is free again, whatever the reason. `sent.wait()` is for threads: it blocks a loop."""
        await asyncio.shield(asyncio.wrap_future(self._free))

    def done(self) -> bool:
        """Whether the refit has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> RefitReport:
        """Wait up to `timeout` seconds for the report. A refit that failed on every replica raises what it failed with.

        Raises:
            TimeoutError: it has not ended yet; it goes on.
            PitstopError: what the refit failed with.
        """
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, RefitReport]:
        return asyncio.wrap_future(self._future).__await__()

    def opened(self, observer: Observer, transport: str) -> None:
        """Tell an observer of the send, and carry its headers in the offer. Called before that is sent."""
        offer = self.offer
        detail: dict[str, Scalar] = {
            "refit_id": offer.refit_id, "weight_version": offer.weight_version, "bytes": offer.nbytes,
            "tensors": len(offer.tensors), "transport": transport,
        }  # fmt: skip
        work = Work("send_weights", self.key, time.time_ns(), headers=offer.headers, detail=detail)
        headers: Mapping[str, str] = observer.opened(work)
        self.offer = replace(offer, headers=dict(headers))
        self._observer = observer

    def released(self, error: PitstopError | None) -> None:
        """The source is free, after `error` if it was not sent. Idempotent. Called by the publisher's thread."""
        if self.source is None:
            return
        self.source.close()
        self.source = None
        self.sent.set()
        self._free.set_result(None)
        if self._observer is not None:
            self._observer.closed(self.key, time.time_ns(), None if error is None else error.slug)

    def settled(self, message: Settled) -> None:
        """The engine says how the refit has ended."""
        try:
            self.end(reported(message), None)
        except ProtocolViolation as wrong:
            self.end(None, wrong)

    def end(self, report: RefitReport | None, error: PitstopError | None) -> None:
        """The refit has ended. Called by the publisher's thread, once."""
        if self._future.done():
            return
        self.released(error or (report.error if report is not None else None))
        if error is None and report is not None and report.outcome is Outcome.FAILED:
            found = (part.error for part in report.replicas.values() if part.error is not None)
            error = report.error or next(found, None) or RefitFailed(f"no replica took version {self.weight_version}")
        if error is not None:
            self._future.set_exception(error)
        elif report is not None:
            self._future.set_result(report)
        else:
            self._future.set_exception(RefitFailed("the refit ended without a report"))
        self.publisher = None
