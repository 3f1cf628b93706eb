"""One refit, from an accepted offer to its report: plan, stage, prove, swap replica by replica, release.

Staging happens while the replicas serve, and its failure costs nothing. Each replica begins its swap as soon as
all its ranks hold the proven version; from then on the replica's own task is in charge of its part.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from pitstop.engine.errors import (
    DeadlineExceeded,
    EngineClosed,
    NotServing,
    OfferRejected,
    PitstopError,
    ProtocolViolation,
    RefitFailed,
    RemoteError,
    ReplicaDied,
    TiedTensorsDiffer,
    from_record,
)
from pitstop.engine.handle import RefitHandle
from pitstop.engine.job import Job, bounded
from pitstop.engine.ledger import Place
from pitstop.engine.lifecycle import Phase, RefitOffered
from pitstop.engine.ports import Observer, Sending, Transport, Work
from pitstop.engine.refit import Outcome, RefitOptions, RefitReport, ReplicaReport, outcome, unequal_ties
from pitstop.engine.replica import SETTLED, Replica
from pitstop.engine.staging import Staging, StagingBegan, StagingDropped, StagingEnded, advance
from pitstop.engine.worker_ports import Manifest, Progress, Ticket, Trailer, WorkerOp

_TAKES_REFIT = frozenset({Phase.SERVING, Phase.IDLE, Phase.QUARANTINED})
_GONE = frozenset({Phase.DEAD, Phase.STOPPED})
_LAST_CALL = 1.0
"""Seconds in which a replica that has failed may still drop what has landed."""


class _Part:
    """One replica's part while the refit runs."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.staging = Staging()
        self.landed: set[int] = set()
        self.began = 0.0
        self.stage_seconds = 0.0
        self.report: ReplicaReport | None = None


class RefitRun:
    """Runs once. `begun` turns true when the first replica starts to suspend: no superseding after that."""

    def __init__(
        self,
        handle: RefitHandle,
        sending: Sending,
        manifest: Manifest,
        options: RefitOptions,
        transport: Transport,
        observer: Observer,
        known: dict[Place, tuple[int, ...]],
        place: Place,
    ) -> None:
        self.handle = handle
        self.place = place
        self.begun = False
        self.superseded_by: int | None = None
        self._sending = sending
        self._offer = sending.offer
        self._manifest = manifest
        self._options = options
        self._transport = transport
        self._observer = observer
        self._known = known
        self._parts: dict[str, _Part] = {}
        self._progressed = asyncio.Event()
        self._jobs: set[asyncio.Future[ReplicaReport]] = set()
        self._began = time.monotonic()
        self._ended_at = 0.0
        self._sent_seconds = 0.0
        self._digests: tuple[int, ...] | None = None
        self._doing: asyncio.Task[None] | None = None

    @property
    def weight_version(self) -> int:
        """The version on its way."""
        return self._offer.weight_version

    async def run(self, replicas: Sequence[Replica], previous: int | None) -> None:
        """Do it. What happened is in the handle's report; raises only when cancelled."""
        self._open(previous)
        error: PitstopError | None = None
        try:
            if self.superseded_by is None:
                self._doing = asyncio.create_task(self._do(replicas), name=f"refit:{self.weight_version}:do")
                await asyncio.wait({self._doing})
                error = _why(self._doing)
        except asyncio.CancelledError:
            if self._doing is not None:
                self._doing.cancel()
            self._end(EngineClosed("the engine was closed while the refit ran"))
            raise
        await self._clean(error)
        self._end(error if self.superseded_by is None else None)
        await self._settle()

    def supersede(self, version: int) -> bool:
        """Give way to a newer version, unless a replica has begun to suspend for this one. Return whether it does."""
        if self.begun:
            return False
        self.superseded_by = version
        if self._doing is not None:
            self._doing.cancel()
        return True

    async def displaced(self) -> None:
        """A newer version took its place before it ran."""
        self._open(None)
        self._end(None)
        await self._settle()

    async def _settle(self) -> None:
        assert self.handle.report is not None
        limit = self._options.deadlines.control
        with contextlib.suppress(PitstopError):
            await bounded(self._sending.settled(self.handle.report), limit, replica="fleet", phase="settle")

    def changed(self) -> None:
        """Some replica changed phase: those that are gone end their part."""
        for part in self._parts.values():
            if part.report is None and part.replica.phase in _GONE and part.replica.job is None:
                gone = ReplicaDied(f"{part.replica.name} died during the refit", replica=part.replica.name)
                self._failed(part, part.replica.error or gone)

    async def _do(self, replicas: Sequence[Replica]) -> None:
        limits = self._options.deadlines
        await self._choose(replicas)
        receivers = [layout for part in self._parts.values() for layout in part.replica.layout]
        limit = limits.receiving(self._manifest.nbytes)
        plan = self._transport.plan(self._offer, self._manifest, receivers, (limit, limits.silence))
        tickets = await bounded(plan, limit, replica="fleet", phase="plan", peer="transport")
        watch = asyncio.create_task(self._watch(), name=f"watch:{self._offer.refit_id}")
        try:
            async with asyncio.timeout(limit):
                await self._stage(tickets)
                if self._open_parts():
                    trailer = await self._sending.send(self._manifest, tickets)
                    self._sent_seconds = time.monotonic() - self._began
                    self._check(trailer)
                    self.handle.sent.reached()
                    await self._transport.seal(trailer)
                while self._staging_parts():
                    await self._next_progress()
        except TimeoutError:
            # Others may be in their swap already: only those that are late fail.
            for part in self._staging_parts():
                self._failed(part, self._late(part.replica.name, limit))
        except BaseException:
            watch.cancel()
            raise
        try:
            while self._open_parts():
                await self._next_progress()
        finally:
            watch.cancel()

    def _late(self, replica: str, limit: float) -> DeadlineExceeded:
        peer = "receivers" if self._sent_seconds else "trainer"
        return DeadlineExceeded(
            f"{replica}: staging did not end within {limit:g} s (waiting for {peer})",
            replica=replica, phase="stage", peer=peer, seconds=limit,
        )  # fmt: skip

    async def _choose(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            if replica.phase not in SETTLED:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._options.deadlines.control):
                        await replica.reached(SETTLED)
            if replica.phase in _TAKES_REFIT and replica.place != self.place:
                self._parts[replica.name] = _Part(replica)
        if not self._parts:
            phases = ", ".join(f"{r.name} is {r.phase.value}" for r in replicas)
            raise NotServing(f"no replica can take a refit: {phases}")

    async def _stage(self, tickets: Sequence[Ticket]) -> None:
        for part in self._parts.values():
            part.staging = advance(part.staging, StagingBegan(self.weight_version))
            part.began = time.monotonic()
            name = part.replica.name
            self._observer.opened(
                Work("stage", self._stage_key(part), time.time_ns(), self._key, detail={"replica": name})
            )
        results = await asyncio.gather(
            *(self._receive(part, tickets) for part in self._parts.values()), return_exceptions=True
        )
        for part, result in zip(list(self._parts.values()), results, strict=True):
            if isinstance(result, PitstopError):
                self._failed(part, result)
            elif isinstance(result, BaseException):
                raise result

    async def _receive(self, part: _Part, tickets: Sequence[Ticket]) -> None:
        replica = part.replica
        mine = tuple(t for t in tickets if t.replica == replica.name and t.incarnation == replica.incarnation)
        op = WorkerOp("receive", self._offer.refit_id, mine)
        limit = self._options.deadlines.control
        replies = await bounded(replica.call_workers(op), limit, replica=replica.name, phase="stage")
        for reply in replies:
            if reply.error is not None:
                raise from_record(reply.error)

    async def _watch(self) -> None:
        try:
            async for progress in self._transport.watch(self._offer.refit_id):
                part = self._parts.get(progress.replica)
                if part is not None and part.report is None and progress.incarnation == part.replica.incarnation:
                    self._progress(part, progress)
        except Exception as failure:  # noqa: BLE001 - a transport's fault ends the refit, not the watch
            error = failure if isinstance(failure, PitstopError) else RemoteError(f"the transport failed: {failure!r}")
            for part in self._staging_parts():
                self._failed(part, error)

    def _progress(self, part: _Part, progress: Progress) -> None:
        if progress.kind == "failed":
            why = from_record(progress.error) if progress.error else RefitFailed("a receiver gave up")
            self._failed(part, why)
        elif progress.kind == "landed":
            part.landed.add(progress.rank)
            if len(part.landed) == len(part.replica.layout):
                self._swap(part)

    def _swap(self, part: _Part) -> None:
        replica = part.replica
        part.staging = advance(part.staging, StagingEnded(self.weight_version))
        part.stage_seconds = time.monotonic() - part.began
        self._observer.closed(self._stage_key(part), time.time_ns())
        if self.superseded_by is not None:
            return
        self.begun = True
        job = Job(
            replica.name, self._offer.refit_id, self.weight_version, self._options, self._manifest.nbytes,
            len(self._manifest.rows), asyncio.get_running_loop().create_future(),
            self.place, {"stage": part.stage_seconds},
        )  # fmt: skip
        self._jobs.add(job.done)
        job.done.add_done_callback(lambda done: self._job_done(part, job, done))
        replica.post(RefitOffered(self._offer.refit_id, self.weight_version), job)
        self._progressed.set()

    def _job_done(self, part: _Part, job: Job, done: asyncio.Future[ReplicaReport]) -> None:
        self._jobs.discard(done)
        # A job waits for the first token after the resume, to report its bubble: that is not the refit's time.
        self._ended_at = max(self._ended_at, job.ended_at)
        if not done.cancelled() and part.report is None:
            report = done.result()
            if report.bubble is not None:
                self._observer.counted("rl.suspend.bubble", report.bubble, {"transport": self._name})
            self._done(part, report)

    def _failed(self, part: _Part, error: PitstopError) -> None:
        if part.report is None:
            if part.stage_seconds == 0.0:
                self._observer.closed(self._stage_key(part), time.time_ns(), error.slug)
            seconds = {"stage": part.stage_seconds or time.monotonic() - part.began}
            self._done(part, ReplicaReport(part.replica.name, False, seconds, error=error))

    def _done(self, part: _Part, report: ReplicaReport) -> None:
        part.report = report
        if part.staging.weight_version is not None:
            part.staging = advance(part.staging, StagingDropped(self.weight_version))
        self.handle.replica_done(report)
        self._progressed.set()

    def _open_parts(self) -> list[_Part]:
        return [part for part in self._parts.values() if part.report is None]

    def _staging_parts(self) -> list[_Part]:
        return [part for part in self._open_parts() if part.stage_seconds == 0.0]

    async def _next_progress(self) -> None:
        await self._progressed.wait()
        self._progressed.clear()

    def _check(self, trailer: Trailer) -> None:
        if trailer.refit_id != self._offer.refit_id:
            raise ProtocolViolation(f"a trailer of refit {trailer.refit_id}, not {self._offer.refit_id}")
        if len(trailer.digests) != len(self._manifest.rows):
            raise RefitFailed(f"the trailer has {len(trailer.digests)} digests for {len(self._manifest.rows)} tensors")
        if differing := unequal_ties(self._manifest, trailer):
            raise TiedTensorsDiffer(f"tied tensors were sent with different content: {differing[0]}")
        known = self._known.get(self.place)
        if known is not None and known != trailer.digests:
            raise OfferRejected(f"version {self.weight_version} was committed before, with other content")
        self._digests = trailer.digests

    async def _clean(self, error: PitstopError | None) -> None:
        why = error or (RefitFailed("a newer version took its place") if self.superseded_by is not None else None)
        refit_id, limit = self._offer.refit_id, self._options.deadlines.control
        if why is not None:
            with contextlib.suppress(PitstopError):
                await bounded(self._transport.abort(refit_id, why), limit, replica="", phase="abort")
            for part in self._open_parts():
                self._failed(part, why)
        op = WorkerOp("release", refit_id)
        living = [part for part in self._parts.values() if part.replica.phase not in _GONE]
        await asyncio.gather(*(self._let_go(part, op) for part in living), return_exceptions=True)
        with contextlib.suppress(PitstopError):
            await bounded(self._transport.release(refit_id), limit, replica="", phase="release")

    async def _let_go(self, part: _Part, op: WorkerOp) -> None:
        # One that has failed may not answer at all, and its error waits for this: it has had its deadline.
        well = part.report is not None and part.report.committed
        limit = self._options.deadlines.control if well else min(self._options.deadlines.control, _LAST_CALL)
        await bounded(part.replica.call_workers(op), limit, replica=part.replica.name, phase="release")

    @property
    def _key(self) -> str:
        return f"refit:{self._offer.refit_id}"

    def _stage_key(self, part: _Part) -> str:
        return f"stage:{self._offer.refit_id}:{part.replica.name}"

    def _open(self, previous: int | None) -> None:
        self._observer.opened(
            Work(
                "refit",
                self._key,
                time.time_ns(),
                headers=self._offer.headers,
                detail={
                    "refit_id": self._offer.refit_id,
                    "weight_version": self.weight_version,
                    "transport": self._name,
                    **({} if previous is None else {"previous": previous}),
                    "policy": self._options.policy,
                    "bytes": self._manifest.nbytes,
                    "tensors": len(self._manifest.rows),
                },
            )
        )

    @property
    def _name(self) -> str:
        return str(getattr(self._sending, "transport", self._transport.name))

    def _end(self, error: PitstopError | None) -> None:
        replicas = {name: part.report for name, part in self._parts.items() if part.report is not None}
        how = Outcome.SUPERSEDED if self.superseded_by is not None else outcome(replicas)
        if how is Outcome.FAILED and error is None:
            error = next((r.error for r in replicas.values() if r.error), None)
        report = RefitReport(
            self._offer.refit_id, self.weight_version, how, self._name, self._manifest.nbytes,
            len(self._manifest.rows), (self._ended_at or time.monotonic()) - self._began, self._sent_seconds, replicas,
            None if how is Outcome.SUPERSEDED else error,
        )  # fmt: skip
        slug = error.slug if error is not None and how is Outcome.FAILED else None
        detail = {"outcome": how.value, "replicas": len(replicas), "seconds": report.seconds}
        if report.bubble is not None:
            detail["bubble"] = report.bubble
        self._observer.closed(self._key, time.time_ns(), slug, detail)
        if self._digests is not None and how in (Outcome.COMMITTED, Outcome.PARTIAL):
            self._known.clear()
            self._known[self.place] = self._digests
        self.handle.end(report)


def _why(task: asyncio.Task[None]) -> PitstopError | None:
    if task.cancelled():
        return RefitFailed("the refit was cancelled")
    failure = task.exception()
    if failure is None or isinstance(failure, PitstopError):
        return failure
    return RemoteError(f"the refit failed: {failure!r}")
