"""The main process's end of the trainer: starts it, speaks with it without blocking the event loop, ends it."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from pitstop.engine.demo import messages
from pitstop.engine.demo.trainer import Training, main
from pitstop.engine.errors import WorkerFailed

M = TypeVar("M", messages.Ready, messages.Trained, messages.Refitted)

FAREWELL_SECONDS: Final = 3.0
SILENCE_SECONDS: Final = 300.0


class Trainer:
    """A trainer in a process of its own. Leaving the context ends the process, whatever state it is in."""

    def __init__(self, training: Training) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._theirs: Connection | None = theirs
        self._process = context.Process(target=main, args=(theirs, training), name="pitstop-trainer", daemon=True)
        self._inbox: dict[type, asyncio.Queue[messages.FromTrainer]] = {}
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._process.start)
        # Only the child's copy is left, so that its death reads as the end of the pipe.
        if self._theirs is not None:
            self._theirs.close()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        if self._lost.done():
            self._lost.exception()
        await asyncio.shield(asyncio.to_thread(self._end, FAREWELL_SECONDS if kind is None else 0.0))

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid

    async def tell(self, message: messages.ToTrainer) -> None:
        """Send a message.

        Raises:
            WorkerFailed: the trainer is gone.
        """
        try:
            # A large batch can fill the pipe before the trainer reads.
            await asyncio.to_thread(self._pipe.send_bytes, messages.packed(message))
        except OSError as error:
            raise self._gone() from error

    async def hear(self, kind: type[M]) -> M:
        """Wait for the next message of a kind.

        Raises:
            WorkerFailed: the trainer failed or is gone, and carries its traceback; or it says nothing for too long.
        """
        queue = self._queue(kind)
        getting = asyncio.ensure_future(queue.get())
        try:
            either: set[asyncio.Future[Any]] = {getting, self._lost}
            done, _ = await asyncio.wait(either, timeout=SILENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise WorkerFailed(f"the trainer owed a {kind.__name__} message for {SILENCE_SECONDS:.0f} s")
            if not getting.done():
                self._lost.result()
            message = getting.result()
        finally:
            getting.cancel()
        assert isinstance(message, kind)
        return message

    def _queue(self, kind: type) -> asyncio.Queue[messages.FromTrainer]:
        return self._inbox.setdefault(kind, asyncio.Queue())

    def _read(self) -> None:
        try:
            message = messages.from_trainer(self._pipe.recv_bytes())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._lose(self._gone())
            return
        if isinstance(message, messages.Failed):
            failure = WorkerFailed(f"the trainer failed: {message.error}")
            failure.remote_traceback = message.traceback
            self._lose(failure)
        else:
            self._queue(type(message)).put_nowait(message)

    def _lose(self, failure: WorkerFailed) -> None:
        if not self._lost.done():
            self._lost.set_exception(failure)

    def _gone(self) -> WorkerFailed:
        self._process.join(1.0)
        return WorkerFailed(f"the trainer's process ended with status {self._process.exitcode}")

    def _end(self, patience: float) -> None:
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()
