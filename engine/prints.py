"""Reads live weights: once after each commit, to remember them, and again on request, to compare.

The workers read beside the engine's steps, so a reading may take as long as it likes. It counts only if its replica has
served from before its beginning until after its end: then no refit can have changed a byte in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from pitstop.engine.drift import Reading, Remembered, ReplicaCheck, VerifyReport, compared
from pitstop.engine.errors import (
    DeadlineExceeded,
    IllegalEvent,
    PitstopError,
    ReadingCutShort,
    WeightsDrifted,
    from_record,
)
from pitstop.engine.job import bounded
from pitstop.engine.ledger import Commit
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import Deadlines
from pitstop.engine.replica import Replica
from pitstop.engine.worker_ports import WorkerOp

log = logging.getLogger("pitstop.engine")

_SETTLING = 0.1
"""Seconds after a commit in which nothing is read: what a resumed engine makes first comes first."""
_FIRST_LOOK, _LAST_LOOK = 0.02, 0.5
"""Seconds between questions whether a reading is done: small models at once, large ones without disturbing."""


class Prints:
    """What the replicas of one fleet had in their live weights at their commits."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._remembered = Remembered()
        self._news = asyncio.Event()
        self._names = itertools.count()
        self._reading = {replica.name: asyncio.Lock() for replica in replicas}
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._bad: dict[str, tuple[Commit, WeightsDrifted]] = {}

    def changed(self) -> None:
        """A replica changed phase, or a refit has ended."""
        self._news.set()

    async def run(self) -> None:
        """Remember what is committed, until cancelled."""
        try:
            while True:
                self._news.clear()
                for replica in self._replicas:
                    self._look_at(replica)
                await self._news.wait()
        finally:
            for task in self._taking.values():
                task.cancel()

    def _look_at(self, replica: Replica) -> None:
        commit = replica.commit
        if commit is None or replica.phase is not Phase.SERVING or self._busy(replica):
            return
        bad = self._bad.get(replica.name)
        if bad is not None and bad[0] is commit:
            # A refit that came before its quarantine has failed, and left it serving.
            self._begin(replica, self._condemn(replica, *bad))
        elif self._remembered.of(commit) is None and self._remembered.why_not(commit) is None:
            self._begin(replica, self._remember(replica, commit))

    def _busy(self, replica: Replica) -> bool:
        task = self._taking.get(replica.name)
        return task is not None and not task.done()

    def _begin(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        self._taking[replica.name] = asyncio.create_task(work, name=f"{replica.name}:prints")

    async def _remember(self, replica: Replica, commit: Commit) -> None:
        await asyncio.sleep(_SETTLING)
        try:
            self._remembered.keep(commit, await self.read(replica, commit))
        except ReadingCutShort:
            pass  # by a refit: its commit is another, or it fails and this is done again
        except PitstopError as error:
            self._remembered.miss(commit, str(error))
            log.info("%s: version %d is not remembered: %s", replica.name, commit.weight_version, error)

    async def _condemn(self, replica: Replica, commit: Commit, error: WeightsDrifted) -> None:
        with contextlib.suppress(IllegalEvent):
            await replica.drifted(error, commit)

    async def read(self, replica: Replica, commit: Commit) -> Reading:
        """Read what is in a replica's live weights, beside its steps.

        Raises:
            ReadingCutShort: it has left `SERVING`, or what it had committed, before the reading was done.
        """
        async with self._reading[replica.name]:
            since, limits, pause = replica.since, Deadlines(), _FIRST_LOOK
            self._must_serve(replica, commit, since)
            op = WorkerOp("fingerprint", f"reading-{next(self._names)}")
            booted = replica.booted
            nbytes = sum(spec.nbytes for spec in booted.inventory.tensors) if booted is not None else 0
            try:
                async with asyncio.timeout(limits.receiving(nbytes)):
                    while (reading := await self._answer(replica, op, limits.finalize)) is None:
                        self._must_serve(replica, commit, since)
                        await asyncio.sleep(pause)
                        pause = min(pause * 2, _LAST_LOOK)
            except TimeoutError:
                seconds = limits.receiving(nbytes)
                raise DeadlineExceeded(
                    f"{replica.name}: its weights were not read within {seconds:g} s",
                    replica=replica.name, phase="verify", peer="workers", seconds=seconds,
                ) from None  # fmt: skip
            self._must_serve(replica, commit, since)
            return reading

    @staticmethod
    def _must_serve(replica: Replica, commit: Commit, since: float) -> None:
        if replica.phase is not Phase.SERVING or replica.since != since or replica.commit is not commit:
            raise ReadingCutShort(f"{replica.name} has been out of service while its weights were read")

    async def _answer(self, replica: Replica, op: WorkerOp, limit: float) -> Reading | None:
        call = replica.backend.call_workers(op)
        replies = await bounded(call, limit, replica=replica.name, phase="verify")
        if (error := next((reply.error for reply in replies if reply.error is not None), None)) is not None:
            raise from_record(error)
        return Reading.of(replies) if all(reply.fingerprint is not None for reply in replies) else None

    async def verify(self, *, raise_on_drift: bool) -> VerifyReport:
        """See `Fleet.verify`."""
        checks = await asyncio.gather(*(self._check(replica) for replica in self._replicas))
        report = VerifyReport({check.replica: check for check in checks})
        if raise_on_drift and report.drifted:
            raise report.drifted[0].error()
        return report

    async def _check(self, replica: Replica) -> ReplicaCheck:
        commit = replica.commit
        if replica.phase is not Phase.SERVING or commit is None:
            return ReplicaCheck(replica.name, "unknown", replica.weight_version, f"it is {replica.phase.value}")
        for _ in range(2):  # what is being read may be of an earlier commit
            self._look_at(replica)
            if self._busy(replica):
                await asyncio.wait({self._taking[replica.name]})
        before = self._remembered.of(commit)
        if before is None:
            why = self._remembered.why_not(commit) or "a refit began before it could be read"
            return ReplicaCheck(replica.name, "unknown", commit.weight_version, f"not remembered: {why}")
        try:
            now = await self.read(replica, commit)
        except PitstopError as error:
            return ReplicaCheck(replica.name, "unknown", commit.weight_version, str(error))
        booted = replica.booted
        nbytes = sum(spec.nbytes for spec in booted.inventory.tensors) if booted is not None else 0
        check = compared(commit, before, now, nbytes)
        if check.state == "drifted":
            self._bad[replica.name] = (commit, check.error())
            log.error("%s", check.error())
            await self._condemn(replica, *self._bad[replica.name])
        return check
