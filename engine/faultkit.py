"""Peers that misbehave on script, around any backend, transport and far end: what a loop built on Pitstop must survive.

    script = Script()
    script.plan("apply", None, "hang")          # the second apply never answers
    backend = FaultyBackend(VllmBackend(model), script)

What a call does when its name comes up, instead of what it should:

    raise    fails with a typed error that says "scripted"; nothing was done
    tear     does it, and then fails: to the caller it is unknown what was done
    hang     never returns; nothing was done
    freeze   does it, and never returns
    forget   from now on nothing answers any more, this call included, and nobody is told of a death
    die      from now on everything fails, as after a SIGKILL
    lie      answers as if all were well, with something that is not so; what, is said at each wrapper

A wrapper hands on everything that its script says nothing about.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NoReturn, TypeVar

from pitstop.engine.counters import Counters
from pitstop.engine.errors import PeerLost, PitstopError, RemoteError, ReplicaDied
from pitstop.engine.ports import Backend, Booted, Leg, Ring, Sending, Transport
from pitstop.engine.refit import Policy, RefitReport
from pitstop.engine.request import Piece, Request
from pitstop.engine.worker_ports import (
    Manifest,
    Mode,
    Offer,
    Progress,
    Ticket,
    Trailer,
    WorkerLayout,
    WorkerOp,
    WorkerReply,
)

T = TypeVar("T")

Fault = Literal["raise", "tear", "hang", "freeze", "forget", "die", "lie"]
FAULTS: Final[tuple[Fault, ...]] = ("raise", "tear", "hang", "freeze", "forget", "die", "lie")


@dataclass(slots=True)
class Script:
    """Faults to come: for each name of a call, what its next calls do (None: what they should)."""

    faults: defaultdict[str, deque[Fault | None]] = field(default_factory=lambda: defaultdict(deque))
    struck: list[tuple[str, Fault]] = field(default_factory=list)  #: what has been played, in order

    def plan(self, name: str, *faults: Fault | None) -> None:
        """Add faults for the next calls of `name`."""
        self.faults[name].extend(faults)

    def next(self, name: str) -> Fault | None:
        """Take the next fault of `name`."""
        fault = self.faults[name].popleft() if self.faults[name] else None
        if fault is not None:
            self.struck.append((name, fault))
        return fault


class _Peer:
    """What the wrappers have in common."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._mute = False
        self._dead: asyncio.Future[PitstopError] | None = None

    def _death(self) -> PitstopError:
        return RemoteError("scripted: dead")

    @property
    def _grave(self) -> asyncio.Future[PitstopError]:
        if self._dead is None:
            self._dead = asyncio.get_running_loop().create_future()
        return self._dead

    def revive(self) -> None:
        """Be well again, if it was mute or dead."""
        self._mute, self._dead = False, None

    async def _play(self, name: str, do: Callable[[], Awaitable[T]], lie: Callable[[T], T] | None = None) -> T:
        fault = None if self._mute or self._grave.done() else self.script.next(name)
        self._mute = self._mute or fault == "forget"
        if self._mute or fault == "hang":
            await self._never()
        if fault == "die" and not self._grave.done():
            self._grave.set_result(self._death())
        if self._grave.done():
            raise self._grave.result()
        if fault == "raise":
            raise RemoteError(f"scripted: {name}")
        result: T = await self._or_death(do())
        if fault == "tear":
            raise RemoteError(f"scripted: {name}, after it was done")
        if fault == "freeze":
            await self._never()
        return result if lie is None or fault != "lie" else lie(result)

    async def _or_death(self, what: Awaitable[T]) -> T:
        """Await something that does not outlive this peer."""
        task: asyncio.Future[T] = asyncio.ensure_future(what)
        grave = self._grave
        both: set[asyncio.Future[Any]] = {task, grave}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
            raise
        if task.done():
            return task.result()
        task.cancel()
        raise grave.result()

    async def _never(self) -> NoReturn:
        raise await asyncio.shield(self._grave)


class FaultyBackend(_Peer):
    """A backend with a script. Names: its methods, and the verbs of `call_workers`.

    Of an order to workers, "raise" and "tear" are errors in the replies; torn, they say `touched`. Lies: `start` claims
    the version above its own; `suspend` counts one token less of every request; `reset_cache` claims to have done it;
    `apply` and `finalize` claim to have done it; every other order is answered by all ranks but the last.
    Its next `start` revives it after "forget" and "die"; `revive` does the same for any wrapper.
    """

    def __init__(self, backend: Backend, script: Script) -> None:
        super().__init__(script)
        self.backend = backend
        self._replica = ""
        self._layout: tuple[WorkerLayout, ...] = ()

    def _death(self) -> PitstopError:
        return ReplicaDied(f"scripted: the engine of {self._replica} died", replica=self._replica)

    async def start(self, replica: str, incarnation: int) -> Booted:
        """See `Backend.start`."""
        self._replica = replica
        self.revive()

        def lie(booted: Booted) -> Booted:
            return replace(booted, weight_version=(booted.weight_version or 0) + 1)

        booted = await self._play("start", lambda: self.backend.start(replica, incarnation), lie)
        self._layout = booted.layout
        return booted

    async def submit(self, request: Request) -> Leg:
        """See `Backend.submit`."""

        async def submit() -> Leg:
            return await self.backend.submit(request)

        return FaultyLeg(await self._play("submit", submit), self)

    async def suspend(self, policy: Policy) -> Mapping[str, int]:
        """See `Backend.suspend`."""

        def lie(counts: Mapping[str, int]) -> Mapping[str, int]:
            return {name: max(0, made - 1) for name, made in counts.items()}

        return await self._play("suspend", lambda: self.backend.suspend(policy), lie)

    async def resume(self) -> None:
        """See `Backend.resume`."""
        await self._play("resume", self.backend.resume)

    async def drained(self) -> None:
        """See `Backend.drained`."""
        await self._play("drained", self.backend.drained)

    async def reset_cache(self) -> bool:
        """See `Backend.reset_cache`."""
        if self.script.faults["reset_cache"] and self.script.faults["reset_cache"][0] == "lie":
            self.script.next("reset_cache")
            return True
        return await self._play("reset_cache", self.backend.reset_cache)

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        """See `Backend.call_workers`."""
        planned = self.script.faults[op.verb]
        fault = planned[0] if planned and not self._mute and not self._grave.done() else None
        if fault == "raise" or (fault == "lie" and op.verb in ("apply", "finalize")):
            self.script.next(op.verb)
            error = RemoteError(f"scripted: {op.verb}").record() if fault == "raise" else None
            return [WorkerReply(place.rank, touched=error is None, error=error) for place in self._layout]
        if fault == "tear":
            self.script.next(op.verb)
            error = RemoteError(f"scripted: {op.verb}, after it was done").record()
            replies = await self._or_death(self.backend.call_workers(op))
            return [replace(reply, error=reply.error or error) for reply in replies]
        return await self._play(op.verb, lambda: self.backend.call_workers(op), lambda replies: replies[:-1])

    async def label(self, weight_version: int) -> None:
        """See `Backend.label`."""
        await self._play("label", lambda: self.backend.label(weight_version))

    async def sleep(self, level: int) -> None:
        """See `Backend.sleep`."""
        await self._play("sleep", lambda: self.backend.sleep(level))

    async def wake(self, *, kv_cache: bool) -> None:
        """See `Backend.wake`."""
        await self._play("wake", lambda: self.backend.wake(kv_cache=kv_cache))

    async def died(self) -> PitstopError:
        """See `Backend.died`. Says nothing of a real death once it has forgotten everything."""
        grave = self._grave
        real = asyncio.ensure_future(self.backend.died())
        try:
            while True:
                await asyncio.wait({real, grave} - ({real} if self._mute else set()), return_when="FIRST_COMPLETED")
                if grave.done():
                    return grave.result()
                if not self._mute:
                    return real.result()
        finally:
            real.cancel()

    async def close(self) -> None:
        """See `Backend.close`. Always ends the real engine, whatever is scripted."""
        await self.backend.close()

    def output_at(self) -> float:
        """See `Backend.output_at`."""
        return self.backend.output_at()

    async def output_after(self, moment: float) -> float:
        """See `Backend.output_after`."""
        return await self._or_death(self.backend.output_after(moment))

    async def counters(self) -> Counters:
        """See `Backend.counters`."""
        return await self._play("counters", self.backend.counters)


class FaultyLeg:
    """A request in a `FaultyBackend`: mute and dead with it. The name of its script is "next".

    What is aborted ends, however mute the engine is: an abort is a matter of this side.
    """

    def __init__(self, leg: Leg, backend: FaultyBackend) -> None:
        self._leg = leg
        self._backend = backend
        self._left = asyncio.Event()

    async def next(self) -> Piece:
        """See `Leg.next`."""
        piece = asyncio.ensure_future(self._backend._play("next", self._leg.next))
        left = asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait({piece, left}, return_when=asyncio.FIRST_COMPLETED)
            return piece.result() if piece.done() else await self._leg.next()
        finally:
            left.cancel()
            piece.cancel()

    def partial(self) -> Piece:
        """See `Leg.partial`."""
        return self._leg.partial()

    def abort(self) -> None:
        """See `Leg.abort`."""
        self._leg.abort()
        self._left.set()


class FaultyTransport(_Peer):
    """A transport with a script. Names: plan, seal, abort, release, replay, and attached, landed, failed for progress.

    Faults of progress strike only that of `replica`, if one is named: "raise" ends the watch with an error; "hang" and
    "freeze" end what is heard of any receiver; "forget" loses this one word; "lie" says `landed` for what has only
    attached, or reports it for a life of the replica that is over. Other lies: `plan` gives tickets for another life
    of every replica; `seal` passes on digests that are wrong by one.
    """

    def __init__(self, transport: Transport, script: Script, replica: str | None = None) -> None:
        super().__init__(script)
        self.transport = transport
        self.name = transport.name
        self._of = replica

    async def plan(
        self,
        offer: Offer,
        manifest: Manifest,
        receivers: Sequence[WorkerLayout],
        limits: tuple[float, float],
        mode: Mode = "auto",
    ) -> Sequence[Ticket]:
        """See `Transport.plan`."""

        def lie(tickets: Sequence[Ticket]) -> Sequence[Ticket]:
            return [replace(ticket, incarnation=ticket.incarnation + 1) for ticket in tickets]

        return await self._play("plan", lambda: self.transport.plan(offer, manifest, receivers, limits, mode), lie)

    def ring(self, refit_id: str) -> Ring | None:
        """See `Transport.ring`."""
        return self.transport.ring(refit_id)

    async def seal(self, trailer: Trailer) -> None:
        """See `Transport.seal`."""
        planned = self.script.faults["seal"]
        if planned and planned[0] == "lie":
            self.script.next("seal")
            trailer = replace(trailer, digests=tuple(digest ^ 1 for digest in trailer.digests))
        await self._play("seal", lambda: self.transport.seal(trailer))

    async def watch(self, refit_id: str) -> AsyncIterator[Progress]:
        """See `Transport.watch`."""
        async for progress in self.transport.watch(refit_id):
            fault = self.script.next(progress.kind) if self._of in (None, progress.replica) else None
            if fault in ("raise", "tear", "die"):
                raise RemoteError(f"scripted: {progress.kind}")
            if fault in ("hang", "freeze") or self._mute:
                await asyncio.Event().wait()
            if fault == "forget":
                continue
            if fault == "lie":
                yield progress
                yield (
                    replace(progress, kind="landed")
                    if progress.kind == "attached"
                    else replace(progress, incarnation=progress.incarnation - 1)
                )
                continue
            yield progress

    async def abort(self, refit_id: str, why: PitstopError) -> None:
        """See `Transport.abort`."""
        await self._play("abort", lambda: self.transport.abort(refit_id, why))

    async def release(self, refit_id: str) -> None:
        """See `Transport.release`."""
        await self._play("release", lambda: self.transport.release(refit_id))

    def replay(self, weight_version: int) -> Sending | None:
        """See `Transport.replay`. Any fault is a version that is gone."""
        return None if self.script.next("replay") is not None else self.transport.replay(weight_version)


class FaultySending(_Peer):
    """A trainer with a script. Names: send, settled; and offer, whose only fault is a lie.

    Lies: `send` returns the trailer of another refit ("lie"); its digests are wrong by one if the name is "digests". An
    `offer` that lies names the version before its own.
    """

    def __init__(self, sending: Sending, script: Script) -> None:
        super().__init__(script)
        self.sending = sending
        self.offer = sending.offer
        if script.next("offer") is not None:
            self.offer = replace(self.offer, weight_version=self.offer.weight_version - 1)

    def _death(self) -> PitstopError:
        return PeerLost("scripted: the trainer died", peer="trainer")

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        """See `Sending.send`."""

        def lie(trailer: Trailer) -> Trailer:
            return replace(trailer, refit_id=f"not-{trailer.refit_id}"[:64])

        trailer = await self._play("send", lambda: self.sending.send(manifest, tickets, ring), lie)
        if self.script.next("digests") is not None:
            trailer = replace(trailer, digests=tuple(digest ^ 1 for digest in trailer.digests))
        return trailer

    async def settled(self, report: RefitReport) -> None:
        """See `Sending.settled`."""
        await self._play("settled", lambda: self.sending.settled(report))
