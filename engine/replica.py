"""One replica: a task with an inbox, the only caller of `lifecycle.advance` for it, at most one action beneath.

An action ends by posting what happened as the next event. Nothing else assigns a phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pitstop.engine.actions import Actions
from pitstop.engine.drafting import Drafting
from pitstop.engine.errors import DeadlineExceeded, EngineClosed, IllegalEvent, PitstopError, RemoteError, ReplicaDied
from pitstop.engine.flight import Flight
from pitstop.engine.gate import Gate
from pitstop.engine.job import Job, bounded
from pitstop.engine.ledger import Commit, Ledger, Place
from pitstop.engine.lifecycle import (
    BootedEmpty,
    BootedWith,
    DeltaOffered,
    Died,
    Do,
    DriftFound,
    Event,
    Phase,
    RefitOffered,
    RestartAsked,
    SleepAsked,
    StopAsked,
    WokenEmpty,
    WokenWhole,
    advance,
)
from pitstop.engine.ports import Backend, Booted, Observer, Scalar, Transition
from pitstop.engine.refit import Deadlines
from pitstop.engine.worker_ports import WorkerLayout, WorkerOp, WorkerReply

log = logging.getLogger("pitstop.engine")

ENGINE_SILENCE = 60.0
"""Seconds in which an engine that has requests must make a token or answer a call. A step may be long on a CPU."""

SETTLED = frozenset({Phase.IDLE, Phase.SERVING, Phase.QUARANTINED, Phase.SLEEPING, Phase.DEAD, Phase.STOPPED})


@dataclass(frozen=True, slots=True)
class _Post:
    """An event on its way to the machine. Events of an earlier incarnation mean nothing."""

    incarnation: int
    event: Event
    job: Job | None = None
    heard: asyncio.Future[None] | None = None


class Replica:
    """Drives one backend through the lifecycle. Create, `run` in a task, `post` events."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        ledger: Ledger,
        observer: Observer,
        changed: Callable[[], None],
        boot_seconds: float,
    ) -> None:
        self.name = name
        self.boot_seconds = boot_seconds
        self.backend = backend
        self.ledger = ledger
        self.observer = observer
        self.drafting = Drafting(name, backend, observer)
        self.gate = Gate()
        self.flights: dict[str, Flight] = {}
        self.booted: Booted | None = None
        self.incarnation = 0
        self.error: PitstopError | None = None
        self.job: Job | None = None
        self.sleeping = SleepAsked(1)
        self.sleep_error: PitstopError | None = None
        self.drift: PitstopError | None = None
        self.changed = changed
        self._phase = Phase.STARTING
        self._since = time.monotonic()
        self._inbox: asyncio.Queue[_Post] = asyncio.Queue()
        self._action: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._listen: asyncio.Task[None] | None = None
        self.silence = ENGINE_SILENCE
        self._actions = Actions(self)
        self._moved = asyncio.Event()
        self._asking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self._phase.value} v{self.weight_version} load {self.load}>"

    @property
    def phase(self) -> Phase:
        """Where the replica is."""
        return self._phase

    @property
    def phase_age(self) -> float:
        """Seconds since it came there."""
        return time.monotonic() - self._since

    @property
    def since(self) -> float:
        """When it came there (`time.monotonic`): the same number means that it has not been elsewhere."""
        return self._since

    @property
    def commit(self) -> Commit | None:
        """What it has proven in this life, if anything."""
        return self.ledger.committed(self.name)

    @property
    def weight_version(self) -> int | None:
        """The version it has proven in this life, if any."""
        commit = self.ledger.committed(self.name)
        return commit.weight_version if commit else None

    @property
    def place(self) -> Place | None:
        """Where that version stands in the fleet's history."""
        commit = self.ledger.committed(self.name)
        return commit.place if commit else None

    @property
    def load(self) -> int:
        """Requests in the engine or on their way in."""
        return len(self.flights) + self.gate.leases

    @property
    def layout(self) -> Sequence[WorkerLayout]:
        """Worker ranks of the present life."""
        return self.booted.layout if self.booted else ()

    def post(self, event: Event, job: Job | None = None) -> None:
        """Put an event into the inbox."""
        self._inbox.put_nowait(_Post(self.incarnation, event, job))

    async def _ask(self, event: Event) -> None:
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Post(self.incarnation, event, heard=heard))
        await heard

    async def reached(self, wanted: frozenset[Phase]) -> Phase:
        """Wait until the replica is in one of `wanted`."""
        while self._phase not in wanted:
            await self._moved.wait()
        return self._phase

    async def sleep(self, level: int, policy: Literal["recompute", "wait", "abort"]) -> None:
        """Give memory back; return when it is given.

        Raises:
            IllegalEvent: the replica is neither serving nor idle. ReplicaDied: it died on the way.
        """
        async with self._asking:
            # A refit or a start that is under way is waited for: each has its own limits.
            await self.reached(SETTLED)
            self.sleep_error = None
            await self._ask(SleepAsked(level, policy))
            await self._action_over()
            if (error := self.sleep_error) is not None:
                await self.reached(SETTLED - {Phase.SLEEPING})
                raise error
            self._must_live()

    async def wake(self) -> None:
        """Take memory again; return when the replica serves, or waits for the refit that level 2 made necessary."""
        async with self._asking:
            await self._action_over()
            event: Event = WokenEmpty() if self.weight_version is None else WokenWhole()
            advance(self._phase, event)
            try:
                limit = Deadlines().resume
                await bounded(self.backend.wake(kv_cache=False), limit, replica=self.name, phase="wake")
            except PitstopError as error:
                self.error = error
                event = Died(error.slug)
            await self._ask(event)
            await self.reached(SETTLED)
            self._must_live()

    async def restart(self) -> None:
        """Boot a new incarnation of a dead replica; return when it waits for the refit that lets it serve."""
        async with self._asking:
            if self._phase is not Phase.DEAD:
                return  # another call has restarted it meanwhile
            # Two engines of one replica would share a device: the dead one is closed first.
            await self._action_over()
            await self._ask(RestartAsked())
            await self.reached(SETTLED)
            self._must_live()

    async def drifted(self, error: PitstopError, commit: Commit) -> None:
        """Take it out of service until a refit, unless it has left by itself what was found to have drifted.

        Raises:
            IllegalEvent: a refit or a sleep came first, and may end with the same commit.
        """
        async with self._asking:
            if self.commit is commit:
                self.drift = error
                await self._ask(DriftFound(error.slug))
                await self._action_over()

    def suspect(self, error: ReplicaDied) -> None:
        """A leg says that the engine is dead; the watch may not have said so yet."""
        if self._phase not in (Phase.DEAD, Phase.STOPPED):
            self.error = self.error or error
            self.post(Died(error.slug))

    async def caught_up(self) -> None:
        """Return when every event that has been posted by now has been looked at."""
        if self._phase is Phase.STOPPED:
            return
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Post(-1, StopAsked(), heard=heard))
        with contextlib.suppress(PitstopError):
            await heard

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        """Run an order in every worker rank. For the coordinator: staging only."""
        return await self.backend.call_workers(op)

    async def run(self) -> None:
        """Live until stopped. The one task of this replica."""
        self._born()
        self.observer.transition(self._transition(Phase.DEAD, RestartAsked(), Phase.STARTING))
        self._begin(Do.BOOT)
        try:
            while self._phase is not Phase.STOPPED:
                post = await self._inbox.get()
                # A stop counts in any life: it may have been asked for just before this one began.
                stops = isinstance(post.event, StopAsked) and post.heard is None
                if stops or post.incarnation == self.incarnation:
                    self._step(post)
                elif post.heard is not None:
                    self._refuse(post, IllegalEvent(f"{self.name} has another life by now", event="ask"))
            await self._action_over()
        finally:
            while not self._inbox.empty():
                self._refuse(self._inbox.get_nowait(), EngineClosed(f"{self.name} was stopped"))
            for task in (self._action, self._watch, self._listen):
                if task is not None:
                    task.cancel()

    def _step(self, post: _Post) -> None:
        try:
            after, do = advance(self._phase, post.event)
        except IllegalEvent as error:
            if isinstance(post.event, Died):
                # A leg and the watch have both said so.
                if post.heard is not None and not post.heard.done():
                    post.heard.set_result(None)
                return
            log.warning("%s: %s", self.name, error)
            self.observer.counted(
                "rl.replica.illegal_events", 1, {"state": self._phase.value, "event": type(post.event).__name__}
            )
            self._refuse(post, error)
            return
        if isinstance(post.event, RefitOffered | DeltaOffered):
            self.job = post.job
        if isinstance(post.event, SleepAsked):
            self.sleeping = post.event
        before, self._phase, self._since = self._phase, after, time.monotonic()
        if after is not Phase.SERVING:
            self.gate.close()
        if self.job is not None:
            self.job.entered(after)
        if do is Do.BOOT:
            self._born()
        self.observer.transition(self._transition(before, post.event, after))
        self._begin(do)
        if post.heard is not None and not post.heard.done():
            post.heard.set_result(None)
        self._moved.set()
        self._moved = asyncio.Event()
        self.changed()

    @staticmethod
    def _refuse(post: _Post, error: PitstopError) -> None:
        if post.heard is not None and not post.heard.done():
            post.heard.set_exception(error)
        if post.job is not None:
            post.job.error = post.job.error or error
            post.job.conclude()

    def _transition(self, before: Phase, event: Event, after: Phase) -> Transition:
        job = self.job
        detail: dict[str, Scalar] = {"flights": len(self.flights)}
        if job is not None:
            detail |= {
                "policy": job.options.policy, "live": job.live, "released": job.released,
                "bytes": job.nbytes, "tensors": job.tensors, "mode": job.mode,
            }  # fmt: skip
            if job.ways is not None:
                detail |= {
                    "copied": job.ways.copied, "straight": job.ways.straight, "reloaded": job.ways.reloaded,
                    "why_reloaded": job.ways.why,
                }  # fmt: skip
        error = getattr(event, "slug", None)
        version = job.weight_version if job else self.weight_version
        return Transition(
            self.name, self.incarnation, before, type(event).__name__, after, time.time_ns(),
            job.refit_id if job else None, version, error, detail,
        )  # fmt: skip

    def _born(self) -> None:
        self._end_watch()
        self.incarnation = self.ledger.born(self.name)
        self.error = None

    def _begin(self, do: Do) -> None:
        if self._action is not None:
            self._action.cancel()
        self._action = asyncio.create_task(self._act(do), name=f"{self.name}:{do.value}")

    async def _act(self, do: Do) -> None:
        try:
            event = await self._actions.perform(do)
        except asyncio.CancelledError:
            if (me := asyncio.current_task()) is None or me.cancelling():
                raise
            # Not our doing: something beneath was cancelled, or says so.
            event = self._actions.failed(do, RemoteError(f"{self.name}: {do.value} was cancelled by the engine"))
        except Exception as error:
            known = error if isinstance(error, PitstopError) else RemoteError(f"{self.name}: {do.value}: {error!r}")
            if not isinstance(error, PitstopError):
                log.exception("%s: %s failed", self.name, do.value)
            event = self._actions.failed(do, known)
        if isinstance(event, BootedWith | BootedEmpty):
            self._watch = asyncio.create_task(self._watch_death(), name=f"{self.name}:watch")
            self._listen = asyncio.create_task(self._watch_silence(), name=f"{self.name}:silence")
        if event is not None:
            self.post(event)

    async def _watch_silence(self) -> None:
        """Notice an engine that lives and does nothing: one that was stopped, or whose input thread died."""
        while True:
            await asyncio.sleep(min(1.0, self.silence / 4))
            if self._phase is not Phase.SERVING or not self.load:
                continue
            await self.drafting.look()
            quiet = time.monotonic() - max(self.backend.output_at(), self._since)
            if quiet < self.silence / 2:
                continue
            try:
                call = self.backend.call_workers(WorkerOp("describe"))
                await bounded(call, self.silence / 2, replica=self.name, phase="serve")
            except DeadlineExceeded as error:
                self.error = error
                self.post(Died(error.slug))
                return
            except PitstopError:
                continue

    async def _watch_death(self) -> None:
        self.error = await self.backend.died()
        self.post(Died(self.error.slug))

    def _end_watch(self) -> None:
        for task in (self._watch, self._listen):
            if task is not None:
                task.cancel()
        self._watch = self._listen = None

    async def _action_over(self) -> None:
        while self._action is not None and not self._action.done():
            await asyncio.wait({self._action})

    def _must_live(self) -> None:
        if self._phase is Phase.DEAD:
            raise self.error or ReplicaDied(f"{self.name} died", replica=self.name)
        if self._phase is Phase.STOPPED:
            raise EngineClosed(f"{self.name} was stopped")

    def stop(self) -> None:
        """End for good. Idempotent."""
        if self._phase is not Phase.STOPPED:
            self.post(StopAsked())
