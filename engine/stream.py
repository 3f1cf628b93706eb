"""What callers iterate over: a stream of one request's chunks, and completions in the order they finish.

Both are classes with `aclose` and a finalizer that may run in any thread. However a caller leaves - `break`, an
exception, cancellation, dropping the last reference - the engine's request is aborted exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from pitstop.engine.flight import Flight, merged
from pitstop.engine.request import Adapter, Chunk, Completion, FinishReason, Piece, Span

_TURN = 0.002  # seconds of rendering in one turn of the loop

Decode = Callable[[Sequence[int]], str]


def chunks(piece: Piece, spans: Sequence[Span]) -> list[Chunk]:
    """Split a piece where weight versions meet. Text cannot be split: it goes with the last chunk."""
    if len(spans) == 1:
        span = spans[0]
        return [
            Chunk(piece.token_ids, piece.logprobs, piece.text, span.start, span.weight_version, piece.finish_reason)
        ]
    out = []
    start = spans[0].start if spans else 0
    for n, span in enumerate(spans):
        low, high = span.start - start, span.end - start
        last = n == len(spans) - 1
        out.append(
            Chunk(
                piece.token_ids[low:high],
                piece.logprobs[low:high],
                piece.text if last else "",
                span.start,
                span.weight_version,
                piece.finish_reason if last else None,
            )
        )
    return out


class Stream:
    """Chunks of one request. Iterate it; use it as an async context manager to be sure it is closed.

    Raises, after the last chunk, the typed error that ended the request.
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._ready: deque[Chunk] = deque()
        self._over = False
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        """The request's id, as spans and logs name it."""
        return self._flight.request_id

    @property
    def adapter(self) -> Adapter | None:
        """The version of the adapter that all its tokens are made with; None without one, or before the first token."""
        return self._flight.adapter

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the stream ended; None while it runs."""
        return self._flight.life.finish_reason

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._over:
                failure, self._flight.failure = self._flight.failure, None
                if failure is not None and self._flight.life.finish_reason == "error":
                    raise failure
                raise StopAsyncIteration
            self._flight.start()
            try:
                piece = await self._flight.pull()
            except BaseException:
                self._over = True
                self._flight.failure = None
                self._flight.abandon()
                raise
            if self._over:
                raise StopAsyncIteration  # closed by another task while this one waited
            if piece.token_ids or piece.finish_reason:
                self._ready.extend(chunks(piece, self._flight.take(piece)))
            if piece.finish_reason:
                self._over = True
                self._flight.end(piece)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Leave the stream; its request is aborted if it still runs. Idempotent."""
        self._over = True
        self._ready.clear()
        self._flight.failure = None
        self._flight.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        _later(self._loop, self._flight.abandon)


async def complete(flight: Flight, decode: Decode) -> Completion:
    """Run a flight to its end. Never raises the request's own error: it is in the completion."""
    flight.start()
    pieces: list[Piece] = []
    try:
        while not pieces or pieces[-1].finish_reason is None:
            pieces.append(await flight.pull())
            flight.take(pieces[-1])
    except BaseException:
        flight.abandon()
        raise
    berth = flight.berth
    flight.end(pieces[-1])
    whole = merged(pieces)
    assert whole.finish_reason is not None
    return Completion(
        request_id=flight.request_id,
        prompt_token_ids=flight.prompt_token_ids,
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        spans=flight.life.spans,
        finish_reason=whole.finish_reason,
        replica=berth.name if berth else None,
        stop_reason=whole.stop_reason,
        cached_tokens=flight.cached_tokens,
        error=flight.failure if whole.finish_reason == "error" else None,
        adapter=flight.adapter,
        place=flight.life.oldest,
        render=whole.text if flight.text else decode,
    )


class Completions:
    """`(index, completion)` of several requests, in the order they finish. Starts when first iterated."""

    def __init__(self, start: Sequence[Callable[[], Completion | Flight]], decode: Decode) -> None:
        self._start = start
        self._decode = decode
        self._left = len(start)
        self._done: asyncio.Queue[tuple[int, Completion | BaseException]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] | None = None
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Completion]:
        if not self._left:
            raise StopAsyncIteration
        if self._tasks is None:
            # A task refers to the queue and the set, not to this object: dropping it would never finalize it.
            self._tasks = set()
            _keep(self._tasks, _begin(self._start, self._decode, self._done, self._tasks))
        try:
            index, result = await self._done.get()
        except BaseException:
            await self.aclose()
            raise
        self._left -= 1
        if isinstance(result, BaseException):
            await self.aclose()
            raise result
        return index, result

    async def aclose(self) -> None:
        """Cancel what is unfinished and wait for it. Idempotent."""
        self._left = 0
        # Since Python 3.12 a gather of what is done ends without a turn of the loop, in which the set would lose it.
        while tasks := [task for task in self._tasks or () if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._tasks:
            _later(self._loop, _cancel, frozenset(self._tasks))


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _begin(
    start: Sequence[Callable[[], Completion | Flight]],
    decode: Decode,
    done: asyncio.Queue[tuple[int, Completion | BaseException]],
    tasks: set[asyncio.Task[None]],
) -> None:
    """Start every request. Rendering a prompt takes time on the loop, so others get their turn in between."""
    since = time.monotonic()
    for index, make in enumerate(start):
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 - raised where the completion is taken
            done.put_nowait((index, error))
            continue
        if isinstance(made, Completion):
            done.put_nowait((index, made))
        else:
            _keep(tasks, _one(index, made, decode, done))
        if time.monotonic() - since > _TURN:
            await asyncio.sleep(0)
            since = time.monotonic()


async def _one(
    index: int, flight: Flight, decode: Decode, done: asyncio.Queue[tuple[int, Completion | BaseException]]
) -> None:
    try:
        result: Completion | BaseException = await complete(flight, decode)
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - raised where the completion is taken
        result = error
    done.put_nowait((index, result))


def _cancel(tasks: frozenset[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


def _later(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: its engine is gone, and the request with it
        loop.call_soon_threadsafe(call, *args)
