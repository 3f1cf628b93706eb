"""What a replica does on the way into each phase. Every action returns the event that ends it, or None."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pitstop.engine.errors import (
    CacheResetRefused,
    DeadlineExceeded,
    EngineClosed,
    PitstopError,
    RemoteError,
    ReplicaDied,
    from_record,
)
from pitstop.engine.job import Incoming, Job, bounded, unless_lost
from pitstop.engine.lifecycle import (
    BootedEmpty,
    BootedWith,
    Died,
    Do,
    Event,
    FailedClean,
    FailedQuarantined,
    FailedTorn,
    FailedUncommitted,
    Finalized,
    Phase,
    Resumed,
    Suspended,
    WeightsLanded,
    WokenEmpty,
    WokenWhole,
)
from pitstop.engine.refit import Deadlines, Policy
from pitstop.engine.worker_ports import Ticket, WorkerOp, WorkerReply, WorkerVerb

if TYPE_CHECKING:
    from pitstop.engine.replica import Replica

log = logging.getLogger("pitstop.engine")

_SETTLE = 10.0
"""Seconds a pause may go on past its deadline before its engine is given up."""
_BUBBLE_WAIT = 1.0
"""Seconds a finished refit waits for the first token after the resume, to report its bubble."""


class Actions:
    """The doing side of one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._counts: Mapping[str, int] = {}
        self._paused = False
        self._kv_asleep = False
        self._was_idle = True
        self._table: dict[Do, Callable[[], Awaitable[Event | None]]] = {
            Do.BOOT: self._boot, Do.ADMIT: self._admit, Do.SUSPEND: self._suspend, Do.RECEIVE: self._receive,
            Do.FINALIZE: self._finalize, Do.COMMIT: self._commit, Do.RELEASE: self._release,
            Do.REVOKE: self._revoke, Do.SLEEP: self._sleep, Do.WAKE: self._wake, Do.BURY: self._bury,
            Do.STOP: self._stop, Do.REST: self._rest, Do.PARK: self._park,
        }  # fmt: skip

    async def perform(self, do: Do) -> Event | None:
        """Do it."""
        return await self._table[do]()

    def failed(self, do: Do, error: PitstopError) -> Event | None:
        """Return the event that says how an action that raised leaves the replica."""
        replica, job = self._replica, self._replica.job
        if job is not None:
            job.error = job.error or error
        if do is Do.SLEEP and not self._kv_asleep and not isinstance(error, ReplicaDied):
            # No memory was given back: the engine goes on as if nothing had been asked.
            replica.sleep_error = error
            return WokenEmpty() if replica.weight_version is None else WokenWhole()
        if isinstance(error, ReplicaDied) or do in (Do.BOOT, Do.SLEEP, Do.WAKE, Do.PARK):
            replica.error = error
            return Died(error.slug)
        if do is Do.SUSPEND:
            return FailedClean(error.slug)
        if do in (Do.RECEIVE, Do.FINALIZE, Do.COMMIT, Do.RELEASE):
            return FailedTorn(error.slug)
        return None

    @property
    def _job(self) -> Job:
        job = self._replica.job
        if job is None:
            raise RemoteError(f"{self._replica.name} has no refit")
        return job

    @property
    def _limits(self) -> Deadlines:
        return self._replica.job.options.deadlines if self._replica.job else Deadlines()

    async def _boot(self) -> Event:
        replica = self._replica
        self._paused = self._kv_asleep = False
        self._counts = {}
        start = replica.backend.start(replica.name, replica.incarnation)
        replica.booted = booted = await bounded(start, replica.boot_seconds, replica=replica.name, phase="boot")
        if booted.weight_version is None:
            return BootedEmpty()
        replica.ledger.commit(replica.name, replica.incarnation, booted.weight_version)
        return BootedWith(booted.weight_version)

    async def _admit(self) -> None:
        replica, job = self._replica, self._replica.job
        commit = replica.ledger.committed(replica.name)
        if commit is None:
            raise RemoteError(f"{replica.name} has committed nothing")
        replica.gate.open(commit)
        replica.changed()
        if job is not None:
            try:
                if job.committed and job.live and job.last_output:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_BUBBLE_WAIT):
                            first = await replica.backend.output_after(job.last_output)
                            job.bubble = first - job.last_output
            finally:
                self._conclude(job)
        await replica.drafting.began(commit.weight_version)

    async def _suspend(self) -> Event:
        replica, job, limits = self._replica, self._job, self._limits
        name, policy = replica.name, job.options.policy
        await bounded(replica.gate.drained(), limits.control, replica=name, phase="suspend", peer="admission")
        await self._clear_way(policy, limits)
        job.acceptance = await replica.drafting.ended()
        self._paused = True
        pause = asyncio.create_task(replica.backend.suspend(policy))
        try:
            done, _ = await asyncio.wait({pause}, timeout=limits.suspend)
        except asyncio.CancelledError:
            pause.cancel()
            raise
        if not done:
            job.error = DeadlineExceeded(
                f"{name}: suspend did not end within {limits.suspend:g} s",
                replica=name, phase="suspend", peer="engine", seconds=limits.suspend,
            )  # fmt: skip
            # A pause cannot be taken back: releasing before it settles would let it strike later.
            done, _ = await asyncio.wait({pause}, timeout=_SETTLE)
            if not done:
                pause.cancel()
                replica.error = job.error
                return Died(job.error.slug)
        self._counts = pause.result()
        job.live = sum(1 for made in self._counts.values() if made)
        job.last_output = replica.backend.output_at()
        return Suspended(len(self._counts)) if job.error is None else FailedClean(job.error.slug)

    async def _clear_way(self, policy: Policy, limits: Deadlines) -> None:
        replica = self._replica
        if policy == "abort":
            for flight in list(replica.flights.values()):
                if flight.leg is not None:
                    flight.leg.abort()
        if policy in ("wait", "abort"):
            limit = limits.drain if policy == "wait" else limits.suspend
            drained = unless_lost(replica.job.incoming if replica.job else None, replica.backend.drained())
            await bounded(drained, limit, replica=replica.name, phase="suspend", peer="requests")

    async def _receive(self) -> Event:
        job, limit = self._job, self._limits.receiving(self._job.nbytes)
        if job.incoming is not None and (failed := await self._take(job.incoming, limit)) is not None:
            return failed
        replies = await self._workers("apply", limit, "receive")
        error = _first_error(replies)
        if error is None:
            return WeightsLanded()
        job.error = error
        if any(reply.touched for reply in replies):
            await self._workers("undo", self._limits.finalize, "receive")
            return FailedTorn(error.slug)
        return self._untouched(error)

    async def _take(self, incoming: Incoming, limit: float) -> Event | None:
        """Have the workers receive into their live parameters; return what came of it if that failed."""
        replica, job, limits = self._replica, self._job, self._limits
        try:
            others = limits.drain + limits.suspend + _SETTLE + limits.control
            await bounded(incoming.ready.wait(), others, replica=replica.name, phase="receive", peer="replicas")
        except PitstopError as error:
            job.error = error
            return self._untouched(error)
        try:
            replies = await self._workers("receive", limits.control, "receive", incoming.tickets)
            if (refused := _first_error(replies)) is not None:
                raise refused
            if any(ticket.slots for ticket in incoming.tickets):
                # Sooner than the others' limits: they wait for this one before anything is sent.
                soon = min(limits.control, limit / 2)
                attached = incoming.attached.wait()
                await bounded(attached, soon, replica=replica.name, phase="receive", peer="receivers")
            await bounded(incoming.landed.wait(), limit, replica=replica.name, phase="receive", peer="trainer")
        except PitstopError as error:
            job.error = error
            # Only the workers know whether a live byte has changed; if they do not say, one has.
            replies = await self._workers("undo", limits.finalize, "receive")
            if _first_error(replies) is not None or any(reply.touched for reply in replies):
                return FailedTorn(error.slug)
            return self._untouched(error)
        return None

    def _untouched(self, error: PitstopError) -> Event:
        replica = self._replica
        if replica.ledger.committed(replica.name) is not None:
            return FailedClean(error.slug)
        return FailedUncommitted(error.slug) if self._was_idle else FailedQuarantined(error.slug)

    async def _finalize(self) -> Event:
        replica, job, limit = self._replica, self._job, self._limits.finalize
        replies = await self._workers("finalize", limit, "finalize")
        if (error := _first_error(replies)) is not None:
            raise error
        # The rank that shows the most of what a plan does not cover.
        job.ways = max((r.ways for r in replies if r.ways is not None), key=lambda w: w.reloaded, default=None)
        # Under `keep` the engine refuses a reset while requests hold blocks; their salt keeps others off them.
        if job.options.policy != "keep" or not job.live:
            fresh = await bounded(replica.backend.reset_cache(), limit, replica=replica.name, phase="finalize")
            if not fresh:
                raise CacheResetRefused(f"{replica.name} refused to drop its prefix cache", replica=replica.name)
        return Finalized(job.weight_version)

    async def _commit(self) -> Event:
        replica, job = self._replica, self._job
        replica.ledger.commit(replica.name, replica.incarnation, job.weight_version, job.place)
        label = replica.backend.label(job.weight_version)
        await bounded(label, self._limits.control, replica=replica.name, phase="resume")
        for request_id, made in self._counts.items():
            flight = replica.flights.get(request_id)
            if flight is None:
                continue
            if made:
                flight.swapped(made, job.place)
            else:
                flight.withdraw()
        job.released = len(self._counts)
        await self._run_again()
        job.committed = True
        return Resumed()

    async def _release(self) -> Event:
        await self._run_again()
        return Resumed()

    async def _run_again(self) -> None:
        replica, limit = self._replica, self._limits.resume
        self._counts = {}
        if self._kv_asleep:
            await bounded(replica.backend.wake(kv_cache=True), limit, replica=replica.name, phase="resume")
        elif self._paused:
            await bounded(replica.backend.resume(), limit, replica=replica.name, phase="resume")
        self._paused = self._kv_asleep = False

    async def _revoke(self) -> None:
        replica = self._replica
        replica.ledger.revoke(replica.name)
        self._was_idle = False
        self._fail_flights(replica.job.error if replica.job else None)
        self._counts = {}
        self._conclude(replica.job)

    async def _park(self) -> None:
        """Stop a serving engine whose weights are not its version's. Its requests end with what they have."""
        replica, limits = self._replica, self._limits
        replica.ledger.revoke(replica.name)
        self._was_idle = False
        self._fail_flights(replica.drift)
        self._paused = True
        await bounded(replica.backend.suspend("abort"), limits.suspend, replica=replica.name, phase="park")
        # Who was on the way in finds an engine that makes nothing any more.
        await bounded(replica.gate.drained(), limits.control, replica=replica.name, phase="park", peer="admission")
        self._fail_flights(replica.drift)

    async def _rest(self) -> None:
        self._was_idle = self._replica.phase is Phase.IDLE
        self._conclude(self._replica.job)

    async def _sleep(self) -> None:
        replica, limits = self._replica, self._limits
        await bounded(replica.gate.drained(), limits.control, replica=replica.name, phase="sleep", peer="admission")
        if not self._paused:
            await self._clear_way(replica.sleeping.policy, limits)
            self._paused = True
            self._counts = await bounded(
                replica.backend.suspend(replica.sleeping.policy), limits.suspend, replica=replica.name, phase="sleep"
            )
        self._kv_asleep = True
        await bounded(
            replica.backend.sleep(replica.sleeping.level), limits.finalize, replica=replica.name, phase="sleep"
        )
        self._kv_asleep = True
        if replica.sleeping.level >= 2:
            replica.ledger.revoke(replica.name)

    async def _wake(self) -> Event:
        await self._run_again()
        return Resumed()

    async def _bury(self) -> None:
        replica = self._replica
        replica.ledger.revoke(replica.name)
        error = replica.error or ReplicaDied(f"{replica.name} died", replica=replica.name)
        if replica.job is not None:
            replica.job.error = replica.job.error or error
        self._fail_flights(error)
        self._conclude(replica.job)
        await self._close()

    async def _stop(self) -> None:
        replica = self._replica
        replica.ledger.revoke(replica.name)
        closed = EngineClosed("the engine was closed while the request ran")
        if replica.job is not None:
            replica.job.error = replica.job.error or closed
        self._fail_flights(closed)
        self._conclude(replica.job)
        await self._close()

    async def _close(self) -> None:
        name = self._replica.name
        try:
            await bounded(self._replica.backend.close(), Deadlines().resume, replica=name, phase="close")
        except PitstopError:
            log.exception("%s: its engine did not close", name)

    async def _workers(
        self, verb: WorkerVerb, limit: float, phase: str, tickets: tuple[Ticket, ...] = ()
    ) -> Sequence[WorkerReply]:
        replica = self._replica
        op = WorkerOp(verb, self._job.refit_id, tickets)
        return await bounded(replica.backend.call_workers(op), limit, replica=replica.name, phase=phase)

    def _fail_flights(self, why: PitstopError | None) -> None:
        replica = self._replica
        error = why or ReplicaDied(f"{replica.name} lost its weights", replica=replica.name)
        for flight in list(replica.flights.values()):
            flight.fail(error)

    def _conclude(self, job: Job | None) -> None:
        if job is None:
            return
        if self._replica.job is job:
            self._replica.job = None
            job.entered(self._replica.phase)
        job.conclude()


def _first_error(replies: Sequence[WorkerReply]) -> PitstopError | None:
    records = [reply.error for reply in replies if reply.error is not None]
    if not replies:
        return RemoteError("no worker answered")
    return from_record(records[0]) if records else None
