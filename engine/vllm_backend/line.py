"""Calls into the engine, each raced against its end.

vLLM never resolves a call that was pending when its core died, and a call that is cancelled half-way may leave the
engine with a request that nobody knows. So every call runs in a task of its own, which the caller's cancellation does
not reach, and the caller waits for a future that the engine's end settles too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pitstop.engine.errors import PitstopError, from_record

T = TypeVar("T")


class Line:
    """The way into one engine. `cut` ends it: pending and later calls raise the reason."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._reason: PitstopError | None = None

    @property
    def reason(self) -> PitstopError | None:
        """Why the line was cut; None while it is up."""
        return self._reason

    async def call(self, work: Coroutine[Any, Any, T], late: Callable[[T], None] | None = None) -> T:
        """Run `work` to its end, whatever becomes of the caller, and return its result.

        `late` takes a result that came when nobody waited for it any more.
        """
        if self._reason is not None:
            work.close()
            raise copied(self._reason)
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.add(outcome)
        self.start(work, lambda task: _settle(task, outcome, late))
        try:
            return await outcome
        except asyncio.CancelledError:
            # The result may have come in the same turn of the loop as the cancellation.
            if not outcome.cancelled() and outcome.exception() is None and late is not None:
                late(outcome.result())
            raise
        finally:
            self._waiting.discard(outcome)

    def start(self, work: Coroutine[Any, Any, T], then: Callable[[asyncio.Task[T]], None] | None = None) -> None:
        """Run `work` without waiting for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(then or _forget)

    def cut(self, reason: PitstopError) -> None:
        """End every call with `reason`. Idempotent: the first reason stands."""
        if self._reason is not None:
            return
        self._reason = reason
        for outcome in self._waiting:
            if not outcome.done():
                outcome.set_exception(copied(reason))
        for task in self._tasks:
            task.cancel()


def copied(error: PitstopError) -> PitstopError:
    """Return an equal error of its own: one that is raised in several tasks would collect all their tracebacks."""
    return from_record(error.record())


def _settle(task: asyncio.Task[T], outcome: asyncio.Future[T], late: Callable[[T], None] | None) -> None:
    if task.cancelled():
        outcome.cancel()
    elif (error := task.exception()) is not None:
        if not outcome.done():
            outcome.set_exception(error)
    elif not outcome.done():
        outcome.set_result(task.result())
    elif late is not None:
        late(task.result())


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
