"""One refit, from an accepted offer to its report: plan, deliver, prove, swap replica by replica, release.

Staged, the version is delivered while the replicas serve, and a failure costs nothing. Each replica begins its swap
as soon as all its ranks hold the proven version. In place, all replicas suspend first, and the version is delivered
into their live parameters. From its suspend on a replica's own task is in charge of its part.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pitstop.engine.errors import (
    DeadlineExceeded,
    EngineClosed,
    NotServing,
    OfferRejected,
    PitstopError,
    ProtocolViolation,
    RefitFailed,
    RemoteError,
    from_record,
)
from pitstop.engine.handle import RefitHandle
from pitstop.engine.job import Incoming, Job, bounded
from pitstop.engine.ledger import Place
from pitstop.engine.lifecycle import Phase, RefitOffered
from pitstop.engine.part import Part
from pitstop.engine.ports import Observer, Sending, Transport, Work
from pitstop.engine.refit import (
    Content,
    Outcome,
    RefitOptions,
    RefitReport,
    ReplicaReport,
    content_of,
    facts,
    outcome,
)
from pitstop.engine.replica import SETTLED, Replica
from pitstop.engine.worker_ports import Manifest, Progress, Staging, Ticket, Trailer, WorkerLayout, WorkerOp

_TAKES_REFIT = frozenset({Phase.SERVING, Phase.IDLE, Phase.QUARANTINED})
_GONE = frozenset({Phase.DEAD, Phase.STOPPED})
_LAST_CALL = 1.0
"""Seconds in which a replica that has failed may still drop what has landed."""


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
        known: dict[Place, Content],
        place: Place,
        tied: Mapping[str, str],
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
        self._tied = tied
        self._parts: dict[str, Part] = {}
        self._mode: Literal["staged", "in_place"] | None = None
        self._staging: tuple[Staging, str] = "", ""
        self._freed = False
        self._progressed = asyncio.Event()
        self._jobs: set[asyncio.Future[ReplicaReport]] = set()
        self._began = time.monotonic()
        self._ended_at = 0.0
        self._sent_seconds = 0.0
        self._content: Content | None = None
        self._doing: asyncio.Task[None] | None = None

    @property
    def weight_version(self) -> int:
        """The version on its way."""
        return self._offer.weight_version

    @property
    def content(self) -> Content | None:
        """What the trainer has sealed, once it has."""
        return self._content

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
        """Some replica changed phase: those that are gone end their part, the last to suspend frees the others."""
        for part in self._parts.values():
            if part.report is None and part.replica.phase in _GONE and part.replica.job is None:
                self._failed(part, part.replica.error or part.gone())
        self._free()

    async def _do(self, replicas: Sequence[Replica]) -> None:
        limits, refit_id = self._options.deadlines, self._offer.refit_id
        await self._choose(replicas)
        receivers = await self._receivers()
        if not receivers:
            return
        limit = limits.receiving(self._manifest.nbytes)
        plan = self._transport.plan(self._offer, self._manifest, receivers, (limit, limits.silence), self._options.mode)
        tickets = await bounded(plan, limit, replica="fleet", phase="plan", peer="transport")
        self._mode = "in_place" if tickets[0].in_place else "staged"
        self._staging = tickets[0].staging, tickets[0].why
        watch = asyncio.create_task(self._watch(), name=f"watch:{refit_id}")
        try:
            try:
                await (self._in_place(tickets, limit) if tickets[0].in_place else self._staged(tickets, limit))
            except Exception as failure:
                # A replica that receives in place is suspended, and perhaps torn: its own task sees to that.
                for part in self._waiting():
                    self._lost(part, _known(failure))
                await self._while(self._open_parts)
                raise
            await self._while(self._open_parts)
        finally:
            watch.cancel()

    async def _receivers(self) -> list[WorkerLayout]:
        """Return every rank that takes part, with what its GPU has to spare now if that decides anything."""
        parts, device = self._open_parts(), self._offer.device
        if device and any(rank.device_id == device for part in parts for rank in part.replica.layout):
            limit = self._options.deadlines.control
            asked = await asyncio.gather(*(part.spare(limit) for part in parts), return_exceptions=True)
            for part, found in zip(parts, asked, strict=True):
                if isinstance(found, BaseException):
                    self._failed(part, _known(found))
            return [rank for found in asked if not isinstance(found, BaseException) for rank in found]
        return [rank for part in parts for rank in part.replica.layout]

    async def _staged(self, tickets: Sequence[Ticket], limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                await self._stage(tickets)
                if tickets[0].slots:
                    await self._attached(min(self._options.deadlines.control, limit / 2))
                await self._send(tickets)
                await self._while(self._waiting)
        except TimeoutError:
            # Others may be in their swap already: only those that are late fail.
            for part in self._waiting():
                self._lost(part, self._late(part.replica.name, "stage", limit))

    async def _in_place(self, tickets: Sequence[Ticket], limit: float) -> None:
        for part in self._open_parts():
            self._post(part, Incoming(part.mine(tickets)))
        if tickets[0].slots:
            # Each replica's own task gives up in time on receivers that do not attach.
            await self._while(self._absent)
        try:
            async with asyncio.timeout(limit):
                await self._send(tickets)
        except TimeoutError:
            for part in self._waiting():
                self._lost(part, self._late(part.replica.name, "receive", limit))

    async def _attached(self, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                await self._while(self._absent)
        except TimeoutError:
            for part in self._absent():
                self._lost(part, self._late(part.replica.name, "stage", limit, "receivers"))

    async def _send(self, tickets: Sequence[Ticket]) -> None:
        if not self._open_parts():
            return
        ring = self._transport.ring(self._offer.refit_id) if tickets[0].slots else None
        sending = asyncio.create_task(self._sending.send(self._manifest, tickets, ring), name="send")
        nobody = asyncio.create_task(self._while(self._open_parts), name="nobody")
        try:
            await asyncio.wait({sending, nobody}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            nobody.cancel()
            if not sending.done():
                # Nobody is left to send to, or nobody waits for it: the trainer is told, and has its source back.
                sending.cancel()
                await asyncio.wait({sending})
        if sending.cancelled() or not self._open_parts():
            return
        trailer = sending.result()
        self._sent_seconds = time.monotonic() - self._began
        self._check(trailer)
        self.handle.sent.reached()
        await self._transport.seal(trailer)

    def _late(self, replica: str, phase: str, limit: float, peer: str = "") -> DeadlineExceeded:
        peer = peer or ("receivers" if self._sent_seconds else "trainer")
        return DeadlineExceeded(
            f"{replica}: {phase} did not end within {limit:g} s (waiting for {peer})",
            replica=replica, phase=phase, peer=peer, seconds=limit,
        )  # fmt: skip

    async def _choose(self, replicas: Sequence[Replica]) -> None:
        ready = any(r.phase in _TAKES_REFIT for r in replicas)
        for replica in replicas:
            # One that boots anew takes its time: those that are there do not wait for it.
            if replica.phase not in SETTLED and not (ready and replica.phase is Phase.STARTING):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._options.deadlines.control):
                        await replica.reached(SETTLED)
            if replica.phase in _TAKES_REFIT and replica.place != self.place:
                self._parts[replica.name] = Part(replica, self._offer.refit_id, self.weight_version, self._observer)
        if not self._parts:
            phases = ", ".join(f"{r.name} is {r.phase.value}" for r in replicas)
            raise NotServing(f"no replica can take a refit: {phases}")

    async def _stage(self, tickets: Sequence[Ticket]) -> None:
        parts = self._open_parts()
        for part in parts:
            part.stage()
        results = await asyncio.gather(*(self._receive(part, tickets) for part in parts), return_exceptions=True)
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, PitstopError):
                self._failed(part, result)
            elif isinstance(result, BaseException):
                raise result

    async def _receive(self, part: Part, tickets: Sequence[Ticket]) -> None:
        replica = part.replica
        op = WorkerOp("receive", self._offer.refit_id, part.mine(tickets))
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
            for part in self._waiting():
                self._lost(part, error)

    def _progress(self, part: Part, progress: Progress) -> None:
        if progress.kind == "failed":
            self._lost(part, from_record(progress.error) if progress.error else RefitFailed("a receiver gave up"))
            return
        part.heard(progress)
        if part.landed and part.job is None:
            part.staged()
            if self.superseded_by is None:
                self._post(part)
        self._progressed.set()

    def _post(self, part: Part, incoming: Incoming | None = None) -> None:
        """Hand the part over to its replica, which suspends."""
        self.begun = True
        replica = part.replica
        part.job = job = Job(
            replica.name, self._offer.refit_id, self.weight_version, self._options, self._manifest.nbytes,
            len(self._manifest.rows), asyncio.get_running_loop().create_future(),
            self.place, dict(part.seconds), incoming,
        )  # fmt: skip
        self._jobs.add(job.done)
        job.done.add_done_callback(lambda done: self._job_done(part, job, done))
        replica.post(RefitOffered(self._offer.refit_id, self.weight_version), job)

    def _job_done(self, part: Part, job: Job, done: asyncio.Future[ReplicaReport]) -> None:
        self._jobs.discard(done)
        # A job waits for the first token after the resume, to report its bubble: that is not the refit's time.
        self._ended_at = max(self._ended_at, job.ended_at)
        if not done.cancelled() and part.report is None:
            report = done.result()
            if report.bubble is not None:
                self._observer.counted("rl.suspend.bubble", report.bubble, {"transport": self._name})
            self._done(part, report)

    def _lost(self, part: Part, error: PitstopError) -> None:
        """What the part waits for will not come. A suspended replica is heard before its part ends."""
        if part.incoming is not None:
            part.incoming.lost(error)
        else:
            self._failed(part, error)

    def _failed(self, part: Part, error: PitstopError) -> None:
        if part.report is None:
            part.staged(error)
            self._done(part, ReplicaReport(part.replica.name, False, dict(part.seconds), error=error))

    def _done(self, part: Part, report: ReplicaReport) -> None:
        self.handle.replica_done(part.end(report))
        self._progressed.set()
        self._free()

    def _free(self) -> None:
        """Let replicas receive in place once all of them are suspended."""
        if self._mode != "in_place" or self._freed:
            return
        parts = self._open_parts()
        if all(part.suspended for part in parts):
            self._freed = True
            for part in parts:
                if part.incoming is not None:
                    part.incoming.ready.reached()

    def _open_parts(self) -> list[Part]:
        return [part for part in self._parts.values() if part.report is None]

    def _waiting(self) -> list[Part]:
        return [part for part in self._parts.values() if part.waits]

    def _absent(self) -> list[Part]:
        return [part for part in self._open_parts() if not part.attached]

    async def _while(self, parts: Callable[[], list[Part]]) -> None:
        while parts():
            await self._progressed.wait()
            self._progressed.clear()

    def _check(self, trailer: Trailer) -> None:
        if trailer.refit_id != self._offer.refit_id:
            raise ProtocolViolation(f"a trailer of refit {trailer.refit_id}, not {self._offer.refit_id}")
        content = content_of(self._manifest, trailer, self._tied)
        if self._known.get(self.place, content) != content:
            raise OfferRejected(f"version {self.weight_version} was committed before, with other content")
        self._content = content

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

    async def _let_go(self, part: Part, op: WorkerOp) -> None:
        # One that has failed may not answer at all, and its error waits for this: it has had its deadline.
        well = part.report is not None and part.report.committed
        limit = self._options.deadlines.control if well else min(self._options.deadlines.control, _LAST_CALL)
        await bounded(part.replica.call_workers(op), limit, replica=part.replica.name, phase="release")

    @property
    def _key(self) -> str:
        return f"refit:{self._offer.refit_id}"

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
            None if how is Outcome.SUPERSEDED else error, self._mode, *self._staging,
        )  # fmt: skip
        slug = error.slug if error is not None and how is Outcome.FAILED else None
        self._observer.closed(self._key, time.time_ns(), slug, facts(report))
        if self._content is not None and how in (Outcome.COMMITTED, Outcome.PARTIAL):
            self._known.clear()
            self._known[self.place] = self._content
        self.handle.end(report)


def _why(task: asyncio.Task[None]) -> PitstopError | None:
    if task.cancelled():
        return RefitFailed("the refit was cancelled")
    failure = task.exception()
    return None if failure is None else _known(failure)


def _known(failure: BaseException) -> PitstopError:
    return failure if isinstance(failure, PitstopError) else RemoteError(f"the refit failed: {failure!r}")
