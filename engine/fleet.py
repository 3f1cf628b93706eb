"""The replicas of one model behind one router: requests in, streams out, refits in between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import anyio.to_thread

from pitstop.engine.adapters import Adapters
from pitstop.engine.coordinator import Again, Coordinator, Delivery, Make
from pitstop.engine.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    NotServing,
    PitstopError,
    RemoteError,
    ReplicaDied,
    UnsupportedPolicy,
)
from pitstop.engine.flight import Flight
from pitstop.engine.handle import RefitHandle
from pitstop.engine.intake import Intake, Terms
from pitstop.engine.ledger import Ledger, Place
from pitstop.engine.lifecycle import Phase
from pitstop.engine.owned import Owned
from pitstop.engine.ports import Backend, Booted, Guarded, Leg, Observer, Renderer, Scalar, Transport
from pitstop.engine.recovery import Keeper, Recovery
from pitstop.engine.refit import Deadlines, Policy, RefitOptions, RefitReport
from pitstop.engine.replica import ENGINE_SILENCE, SETTLED, Replica
from pitstop.engine.request import Completion, Life, Prompt, Request, SamplingParams
from pitstop.engine.router import Router
from pitstop.engine.stream import Completions, Stream
from pitstop.engine.upkeep import Upkeep

log = logging.getLogger("pitstop.engine")

Service = Callable[[], Coroutine[Any, Any, None]]

SUBMIT_SECONDS = ENGINE_SILENCE
"""How long an engine may take to accept a request, ten thousand others that come with it included. Until then the
request holds up any refit of that replica."""


class Fleet(Owned):
    """Runs replicas. An async context manager; entering waits until every replica has booted.

    One supervisor task owns everything; `async with` only signals it, so entering and leaving may happen in
    different tasks (as pytest fixtures do).
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        transport: Transport,
        observer: Observer,
        *,
        renderer: Renderer | None = None,
        services: Sequence[Service] = (),
        context: Callable[[], Mapping[str, str]] = dict,
        labels: Mapping[str, Scalar] | None = None,
        recovery: Recovery | None = None,
        boot_seconds: float | None = None,
    ) -> None:
        """`recovery`: lost replicas are recovered without being asked, in this way. `boot_seconds`: a start's limit."""
        limit = (Deadlines() if boot_seconds is None else Deadlines(boot=boot_seconds)).boot
        self._ledger = Ledger()
        self._observer = observer = observer if isinstance(observer, Guarded) else Guarded(observer)
        self.replicas: tuple[Replica, ...] = tuple(
            Replica(f"replica-{n}", backend, self._ledger, observer, self._changed, limit)
            for n, backend in enumerate(backends)
        )
        self._coordinator = Coordinator(self.replicas, self._ledger, transport, observer, self._idle)
        self._upkeep = Upkeep(self.replicas)
        self._keeper = Keeper(
            self.replicas, self._ledger, self._coordinator, transport, observer, self._upkeep, self._given_up, recovery
        )
        self._router = Router(
            self.replicas, lambda: self._coordinator.busy or self._keeper.hopeful, self._keeper.verdict
        )
        self._services = services
        self._context = context
        newest = self._newest
        self._adapters = Adapters(self.replicas)
        self._intake = Intake(renderer, self._admit, observer, context, labels or {}, newest, self._adapters)
        self._supervisor: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None
        self._failure: PitstopError | None = None
        self._open = False

    @property
    def weight_version(self) -> int | None:
        """The oldest version that any replica serves; None while none does."""
        return self._ledger.oldest

    @property
    def adapters(self) -> Mapping[str, int]:
        """The adapters that requests may name, and which version of each they would get now."""
        return self._adapters.versions

    # -- life ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise EngineClosed("an engine can be entered once")
        self._stop = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise(self._stop), name="pitstop")
        ready = asyncio.create_task(self._ready())
        try:
            await asyncio.wait({ready, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
            await (self._closed_early() if self._stop.is_set() else ready)
        except BaseException:
            ready.cancel()
            with contextlib.suppress(PitstopError):
                await self.aclose()
            raise
        self._open = True
        self._keeper.begin()
        return self

    async def _closed_early(self) -> None:
        raise self._failure or EngineClosed("the engine was closed while it started")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except PitstopError:
            if error is None:
                raise

    async def aclose(self) -> None:
        """End every request with an error, every replica and every process. Idempotent, bounded.

        Raises:
            PitstopError: what had ended the engine before, if it was not this.
        """
        self._open = False
        if self._supervisor is None or self._stop is None:
            return
        self._stop.set()
        closing = asyncio.shield(asyncio.gather(self._supervisor, return_exceptions=True))
        try:
            await closing
        except asyncio.CancelledError:
            await closing
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _supervise(self, stop: asyncio.Event) -> None:
        async with anyio.create_task_group() as group:
            for service in (*self._services, self._coordinator.run, self._keeper.run, self._upkeep.prints.run):
                group.start_soon(self._served, service, stop)
            async with anyio.create_task_group() as lives:
                for replica in self.replicas:
                    lives.start_soon(self._served, replica.run, stop)
                try:
                    await stop.wait()
                finally:
                    self._open = False
                    self._keeper.close()
                    self._coordinator.close()
                    for replica in self.replicas:
                        replica.stop()
            group.cancel_scope.cancel()

    async def _served(self, service: Service, stop: asyncio.Event) -> None:
        """Run a part of the engine; without it the engine cannot go on, so its failure closes everything in order."""
        try:
            await service()
        except Exception as failure:
            known = isinstance(failure, PitstopError)
            log.log(logging.ERROR, "the engine ends: %r", failure, exc_info=None if known else failure)
            error = failure if isinstance(failure, PitstopError) else RemoteError(f"the engine failed: {failure!r}")
            self._failure = self._failure or error
            stop.set()

    async def _ready(self) -> None:
        for replica in self.replicas:
            await replica.reached(SETTLED)
            if replica.phase in (Phase.DEAD, Phase.STOPPED):
                raise replica.error or NotServing(f"{replica.name} did not boot")
        if self._intake.renderer is not None:
            try:
                # Not on the loop, not at the first text prompt, and not while an engine's start imports the same
                # libraries in another thread: their modules import each other and do not stand that.
                await anyio.to_thread.run_sync(self._intake.renderer.decode, ())
            except PitstopError as error:
                log.warning("prompts must be token ids: %s", error)
                self._intake.renderer = None

    def _newest(self) -> Place | None:
        return self._ledger.newest

    def _idle(self) -> None:
        self._keeper.refitted()
        self._router.changed()
        self._upkeep.prints.changed()

    def _given_up(self) -> None:
        self._router.changed()

    def _changed(self) -> None:
        self._keeper.changed()
        self._router.changed()
        self._coordinator.changed()
        self._upkeep.prints.changed()

    # -- requests --------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        adapter: str | None = None,
    ) -> Stream:
        """Stream one request's tokens as they are made.

        Args:
            prompt: text, token ids, chat messages, or a mapping with `prompt_token_ids`, `prompt` or `messages`.
            params: how to sample; by default `SamplingParams()`, which runs to the end of the context.
            session_id: requests of one session go to one replica as long as it serves, for its prefix cache.
            priority: the backend's: lower goes first, on engines launched with `scheduling_policy="priority"`.
            trace_headers: W3C trace context of the request; by default the caller's current span.
            adapter: name of an adapter (`adapters`); the request gets the version that is there when it is admitted.

        Returns:
            An async iterator of `Chunk`; it starts when first iterated and is aborted when left.

        Raises:
            InvalidRequest: the prompt or the parameters cannot run. EngineClosed: outside `async with`.
            Iterating raises ReplicaDied, NotServing, ... after the last chunk.
        """
        return Stream(self._flight(prompt, params, Terms(session_id, priority, trace_headers, adapter), deltas=True))

    def generate_async(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        session_id: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        adapter: str | None = None,
    ) -> Completions:
        """Complete several prompts.

        `params` is for all prompts, or a sequence with one for each; the other arguments are those of `stream`.

        Returns:
            An async iterator of `(index, Completion)` in the order they finish. A prompt that cannot run gives
            a completion with `finish_reason="error"`, and the others are unaffected.

        Raises:
            EngineClosed: outside `async with`. InvalidRequest: as many parameters as prompts are needed, or one.
        """
        self._must_be_open()
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise InvalidRequest("generate_async takes a sequence of prompts; put a single prompt into a list")
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(each)} sampling parameters for {len(prompts)} prompts")

        terms = Terms(session_id, priority, trace_headers, adapter)

        def starter(prompt: Prompt, one: SamplingParams | None) -> Callable[[], Completion | Flight]:
            return lambda: self._flight_or_error(prompt, one, terms)

        return Completions([starter(p, one) for p, one in zip(prompts, each, strict=True)], self._decode)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Complete one prompt and return it; raises the completion's error if it has one. `options` as in `stream`."""
        async with self.generate_async([prompt], params, **options) as completions:
            async for _, completion in completions:
                if completion.error is not None:
                    raise completion.error
                return completion
        raise EngineClosed("the request never ran")

    def staleness(self, completion: Completion) -> int:
        """Return how many versions its oldest weights are behind the newest committed ones; 0 without tokens.

        Never negative: a rebase is one version, whatever the trainer calls it.
        """
        newest = self._ledger.newest
        return newest.number - completion.place if newest is not None and completion.place is not None else 0

    def abort(self, request_id: str | None = None) -> int:
        """End one request, or all, with what they have, in an engine or waiting; return how many that were."""
        under_way = [f for f in list(self._intake.flights.values()) if f.life.life is not Life.ENDED]
        chosen = [f for f in under_way if request_id in (None, f.request_id)]
        for flight in chosen:
            flight.cut()
        return len(chosen)

    def _flight(self, prompt: Prompt, params: SamplingParams | None, terms: Terms, *, deltas: bool) -> Flight:
        self._must_be_open()
        return self._intake.flight(prompt, params, terms, self._booted(), deltas=deltas)

    def _flight_or_error(self, prompt: Prompt, params: SamplingParams | None, terms: Terms) -> Completion | Flight:
        try:
            return self._flight(prompt, params, terms, deltas=False)
        except InvalidRequest as error:
            return self._intake.refused(error)

    async def _admit(self, flight: Flight) -> None:
        while True:
            replica = await self._router.admit(flight.session_id, flight.waits)
            try:
                with replica.gate.lease() as commit:
                    salt = self._adapters.salted(flight, f"w{commit.weight_version}.{commit.number}")
                    leg = await self._submit(replica, flight.request(salt))
                    flight.boarded(replica, leg, commit.place)
            except ReplicaDied as error:
                # No engine had accepted it, so nothing of it is lost: another replica may take it.
                replica.suspect(error)
                await replica.caught_up()
                if replica.gate.commit is not None:
                    raise
            else:
                return

    @staticmethod
    async def _submit(replica: Replica, request: Request) -> Leg:
        # No task of its own, as other calls have: this one leaves nothing in the engine when it is cancelled.
        try:
            async with asyncio.timeout(SUBMIT_SECONDS):
                return await replica.backend.submit(request)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{replica.name} did not take request {request.request_id} within {SUBMIT_SECONDS:g} s",
                replica=replica.name, phase="submit", peer="engine", seconds=SUBMIT_SECONDS,
            ) from None  # fmt: skip

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._intake.renderer.decode(token_ids) if self._intake.renderer is not None else ""

    def _booted(self) -> Booted:
        for replica in self.replicas:
            if replica.booted is not None:
                return replica.booted
        raise NotServing("no replica has booted")

    def _must_be_open(self) -> None:
        if not self._open:
            raise EngineClosed("use the engine inside its `async with` block")

    # -- weights and lives -------------------------------------------------------------------------------

    def offer(
        self, make: Make, options: RefitOptions, handle: RefitHandle, *, again: Again | None = None
    ) -> RefitHandle:
        """Take a refit offer from wherever it comes; return its handle at once. `again` offers it once more."""
        self._must_be_open()
        self._coordinator.offer(handle, make, options, again=again)
        return handle

    async def recover(
        self,
        source: str | os.PathLike[str] | None = None,
        *,
        weight_version: int | None = None,
        cast: Literal["inventory"] | None = None,
        vocabulary: Literal["trim"] | None = None,
        policy: Policy = "recompute",
        deadlines: Deadlines | None = None,
        rebase: bool = False,
    ) -> RefitReport | None:
        """Bring dead, quarantined and idle replicas back to the version that the fleet serves.

        Dead ones are booted anew. Without `source` the version comes from where the last refit left it, or from the
        checkpoint that it came from, that of the launch included; the trainer is not asked. Where no replica serves
        any more, what the trainer sent last is taken even if its refit had failed.

        Args:
            source: folder of a checkpoint to recover from.
            weight_version: the version it holds; by default the fleet's, and then its content must be the same.
            cast, vocabulary: as in `refit`.
            policy: fate of requests in flight on replicas that serve another version.
            deadlines: limits of that refit.
            rebase: the version may be below the fleet's; later ones are counted from it.

        Returns:
            The report of that refit, or None when every replica serves that version already: `source` is not opened.

        Raises:
            NotServing: no version is at hand any more: publish it again, or name a checkpoint.
            StaleVersion: `weight_version` is below the fleet's, and no rebase.
            OfferRejected: the checkpoint does not hold what was committed as that version.
        """
        self._must_be_open()
        options = RefitOptions(policy=policy, deadlines=deadlines or Deadlines(), rebase=rebase)
        given = None
        if source is not None:
            newest = self._ledger.newest
            version = weight_version if weight_version is not None else newest.weight_version if newest else None
            if version is None:
                raise UnsupportedPolicy("nothing was ever committed: say which weight_version the checkpoint holds")
            given = self._checkpoint(source, version, cast, options, vocabulary)
        elif weight_version is not None or cast is not None or vocabulary is not None or rebase:
            raise UnsupportedPolicy("weight_version, cast, vocabulary and rebase are about a source: name one")
        return await self._keeper.recover(given, options)

    def _checkpoint(
        self,
        source: str | os.PathLike[str],
        version: int,
        cast: Literal["inventory"] | None,
        options: RefitOptions,
        vocabulary: Literal["trim"] | None = None,
    ) -> Delivery:
        """Return what opens a checkpoint; for those who know how."""
        raise UnsupportedPolicy(f"this fleet reads no checkpoints, so not {os.fspath(source)}")
