"""A request in flight: its life, the leg it is on, and what the consumer takes from it.

A flight is driven by its consumer's task; there is no pump. A replica reaches into its flights only at a swap
(`swapped`, `withdraw`) and at a loss (`fail`), always synchronously.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pitstop.engine.errors import EngineClosed, IllegalEvent, PitstopError, ReplicaDied
from pitstop.engine.ledger import Place
from pitstop.engine.ports import Leg, Observer, Scalar, Work
from pitstop.engine.request import Adapter, Life, Piece, Request, RequestLife, SamplingParams, Span


class Berth(Protocol):
    """Where a flight's leg runs: the replica, as flights see it."""

    name: str
    flights: dict[str, Flight]

    def suspect(self, error: ReplicaDied) -> None:
        """A leg says that the engine is dead; the replica may not know yet."""


class CutShort(Exception):
    """Raised in a request that was ended while it waited for admission."""


Admit = Callable[["Flight"], Coroutine[Any, Any, None]]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Flight:
    """One request on its way through the fleet."""

    life: RequestLife
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    admit: Admit
    observer: Observer
    deltas: bool
    text: bool
    priority: int = 0
    session_id: str | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Scalar] = field(default_factory=dict)
    newest: Callable[[], Place | None] = lambda: None
    adapter_name: str | None = None
    adapter: Adapter | None = None
    left: Callable[[Flight], None] = lambda _: None
    leg: Leg | None = None
    berth: Berth | None = None
    failure: PitstopError | None = None
    holds: int = 0
    cached_tokens: int | None = None
    first_token_at: int = 0
    opened: bool = False
    waiter: asyncio.Future[None] | None = None
    _cut_asked: bool = False

    @property
    def request_id(self) -> str:
        """The request's id, unique in the process."""
        return self.life.request_id

    def request(self, cache_salt: str) -> Request:
        """Return the request as a backend takes it."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            max_tokens=self.max_tokens,
            cache_salt=cache_salt,
            deltas=self.deltas,
            text=self.text,
            priority=self.priority,
            session_id=self.session_id,
            trace_headers=self.trace_headers,
            adapter=self.adapter,
        )

    def boarded(self, berth: Berth, leg: Leg, place: Place) -> None:
        """An engine has accepted the request; it gets it back if the consumer has left meanwhile."""
        if self.life.life is Life.ENDED:
            leg.abort()
            raise EngineClosed(f"request {self.request_id} was closed while it was being admitted")
        self.life.accepted(place.weight_version, place.number)
        self.leg, self.berth = leg, berth
        berth.flights[self.request_id] = self
        if self._cut_asked:
            leg.abort()

    def swapped(self, made: int, place: Place) -> None:
        """The engine's weights changed after exactly `made` tokens of this leg."""
        self.holds += 1
        self.life.swapped(made, place.weight_version, place.number)

    def withdraw(self) -> None:
        """Leave the engine without a token, to be admitted again under the new version."""
        leg, berth = self.leg, self.berth
        if leg is None or berth is None:
            raise IllegalEvent(f"request {self.request_id} is in no engine", event="withdraw")
        self.life.withdrawn(0)
        self.holds += 1
        self.leg = self.berth = None
        berth.flights.pop(self.request_id, None)
        leg.abort()

    def fail(self, error: PitstopError) -> None:
        """End with `error` what the engine still holds; tokens made so far are kept."""
        if self.failure is None:
            self.failure = error
        if self.leg is not None:
            self.leg.abort()

    def cut(self) -> None:
        """End with what there is, wherever the request is. Synchronous, idempotent."""
        self._cut_asked = True
        if self.leg is not None:
            self.leg.abort()
        elif self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(CutShort())

    def waits(self, waiter: asyncio.Future[None]) -> None:
        """Remember what the request's admission waits for."""
        self.waiter = waiter

    def start(self) -> None:
        """Open the request's span. Called once, before the first admission."""
        if self.opened:
            return
        self.opened = True
        self.trace_headers = self.observer.opened(
            Work(
                "generate",
                f"generate:{self.request_id}",
                time.time_ns(),
                headers=self.trace_headers,
                detail={
                    **self.labels,
                    "prompt_tokens": len(self.prompt_token_ids),
                    "max_tokens": self.max_tokens,
                    "temperature": self.params.temperature,
                    "top_p": self.params.top_p,
                    "stream": self.deltas,
                    **({} if self.params.seed is None else {"seed": self.params.seed}),
                    **({} if self.session_id is None else {"session_id": self.session_id}),
                },
            )
        )

    async def pull(self) -> Piece:
        """Wait for the next piece. The one with a `finish_reason` is the last; on "error", `failure` says why.

        Raises:
            asyncio.CancelledError: the consumer was cancelled; call `abandon`.
        """
        if not self.max_tokens:
            return Piece((), finish_reason="length")
        while True:
            leg = self.leg
            if leg is None:
                if self._cut_asked:
                    return self._ending(Piece((), finish_reason="abort"))
                try:
                    await self.admit(self)
                except CutShort:
                    return self._ending(Piece((), finish_reason="abort"))
                except PitstopError as error:
                    self.failure = error
                    return self._ending(Piece((), finish_reason="error"))
                continue
            try:
                piece = await leg.next()
            except PitstopError as error:
                if self.leg is not leg:
                    continue
                if isinstance(error, ReplicaDied) and self.berth is not None:
                    self.berth.suspect(error)
                self.failure = self.failure or error
                rest = leg.partial()
                piece = Piece(rest.token_ids, rest.logprobs, rest.text, "error")
            if self.leg is not leg:
                continue  # withdrawn while we waited: this is the abort of a leg we have left
            if piece.finish_reason == "abort" and self.failure is not None:
                piece = Piece(piece.token_ids, piece.logprobs, piece.text, "error")
            if piece.cached_tokens is not None and self.cached_tokens is None:
                self.cached_tokens = piece.cached_tokens
            if piece.token_ids and not self.first_token_at:
                self.first_token_at = time.time_ns()
            return self._ending(piece) if piece.finish_reason else piece

    def take(self, piece: Piece) -> list[Span]:
        """Count a pulled piece's tokens; return the spans they belong to, none when it ended before any engine."""
        if self.life.life is Life.QUEUED:
            return []
        return self.life.took(len(piece.token_ids))

    def end(self, piece: Piece) -> None:
        """Close the life of a flight whose last piece was taken."""
        if piece.finish_reason is not None:
            self.life.ended(piece.finish_reason)
            self._report(piece.finish_reason)

    def abandon(self) -> None:
        """The consumer is gone: take the request out of its engine. Idempotent, synchronous."""
        if self.life.life is Life.ENDED:
            return
        leg = self.leg
        self._leave()
        self.life.ended("abort")
        if leg is not None:
            leg.abort()
        self._report("abort")

    def _ending(self, piece: Piece) -> Piece:
        self._leave()
        return piece

    def _leave(self) -> None:
        if self.berth is not None:
            self.berth.flights.pop(self.request_id, None)

    def _report(self, reason: str) -> None:
        if self.adapter is not None:
            self.left(self)
        if not self.opened:
            return
        spans = self.life.spans
        now = time.time_ns()
        detail: dict[str, str | int | float | bool] = {
            "finish_reason": reason,
            "output_tokens": self.life.taken,
            "holds": self.holds,
            "segments": len(spans),
        }
        if self.berth is not None:
            detail["replica"] = self.berth.name
        if self.adapter is not None:
            detail |= {"adapter": self.adapter.name, "adapter_version": self.adapter.weight_version}
        if spans:
            detail |= {"version_first": spans[0].weight_version, "version_last": spans[-1].weight_version}
            if (newest := self.newest()) is not None and self.life.oldest is not None:
                self.observer.counted("rl.staleness", newest.number - self.life.oldest, {"at": "completion"})
        if self.first_token_at:
            detail["first_token_at"] = self.first_token_at
        if self.cached_tokens is not None:
            detail["cached_tokens"] = self.cached_tokens
        error = self.failure.slug if reason == "error" and self.failure else None
        self.observer.closed(f"generate:{self.request_id}", now, error, detail)


def merged(pieces: Sequence[Piece]) -> Piece:
    """Join pieces of one flight into one."""
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return Piece(
        [t for p in pieces for t in p.token_ids],
        [x for p in pieces for x in p.logprobs],
        "".join(p.text for p in pieces),
        last.finish_reason,
        last.stop_reason,
    )
