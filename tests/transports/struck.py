"""Processes that can be struck at any step of a refit: a trainer that publishes, a replica's rank that receives.

`kill` and `stop` are what the signals do. `mute`: it lives and beats, and says and does nothing more. `silent`: it
lives, and does not even beat. What is stopped, mute or silent is woken by SIGCONT, and goes on where it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Literal

from pitstop.engine.errors import ErrorRecord, PitstopError, RemoteError, WorkerFailed
from pitstop.engine.ports import Booted
from pitstop.engine.simulated import Delays, SimulatedBackend
from pitstop.engine.worker_ports import Bucket, Ticket, WorkerOp, WorkerReply
from pitstop.transports.sources import TensorSource
from tests.transports.children import Child, Sink, Worker, _server
from tests.transports.weights import inventory, weights

How = Literal["kill", "stop", "mute", "silent", "raise"]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "mute": signal.SIGUSR1, "silent": signal.SIGUSR2}


class Mood:
    """Of this process. Its main thread must be there to hear signals."""

    def __init__(self, heard: Connection) -> None:
        self.how = ""
        self._heard = heard
        for how, number in (("mute", signal.SIGUSR1), ("silent", signal.SIGUSR2), ("", signal.SIGCONT)):
            signal.signal(number, lambda *_, how=how: self._is(how))

    def _is(self, how: str) -> None:
        self.how = how
        if how:
            self._heard.send(how)

    def order(self, pipe: Connection) -> Any:
        """Wait for what comes next. A signal that comes just before a wait is not heard during it: so, short ones."""
        while not pipe.poll(0.05):
            pass
        return pipe.recv()

    def sulk(self, *hows: str) -> None:
        """Wait until the mood is another one."""
        while self.how in hows:
            time.sleep(0.02)


class Held(TensorSource):
    """Writes a tensor a time, and waits at one of them until it is told to go on."""

    at = -1
    fails = False
    pipe: Connection
    mood: Mood

    def pack(self, slots: Any, into: Any, digests: Any) -> Iterator[int]:
        for n, slot in enumerate(slots):
            # By row, and not by number: a ring has a row packed in parts, and one without content not at all.
            if 0 <= self.at <= slot.index:
                self.at = -1
                self.pipe.send("held")
                while self.mood.how == "mute" or not self.pipe.poll():
                    time.sleep(0.02)
                    yield 0
                self.pipe.recv()
                if self.fails:
                    raise ValueError("this shard cannot be gathered")
            yield from super().pack([slot], into, digests[n : n + 1])


def _read(path: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(f"{path}/model.safetensors"))


def train(pipe: Connection, heard: Connection, address: str, deadlines: dict[str, float]) -> None:
    """A trainer: publishes the versions that it is told to, and says what became of each."""
    from pitstop.transports import Publisher
    from pitstop.transports.messages import Accept

    mood = Mood(heard)
    with Publisher.connect(address) as publisher:
        link: Any = publisher._link
        serve, hear = link._serve, link._hear

        def moody_serve(seconds: float) -> None:
            mood.sulk("silent")
            serve(seconds)

        def moody_hear(message: Any) -> None:
            if mood.how != "mute" or not isinstance(message, Accept):
                hear(message)

        link._serve, link._hear = moody_serve, moody_hear
        pipe.send("connected")
        while (order := mood.order(pipe)) is not None:
            version, at, fails, path = order
            source = Held((weights(version) if path is None else _read(path)).items())
            source.at, source.fails, source.pipe, source.mood = at, fails, pipe, mood
            handle = publisher.publish(source, weight_version=version, deadlines=deadlines)
            try:
                while not handle.done():
                    time.sleep(0.02)
                report = handle.result(0)
            except PitstopError as error:
                pipe.send((error.slug, error.message, {}))
            else:
                errors = {name: part.error.slug for name, part in report.replicas.items() if part.error is not None}
                pipe.send((report.outcome.value, "", errors))


class _FailingSink(Sink):
    fails = ""

    def landed(self, bucket: Bucket) -> None:
        if self.fails == "landed":
            raise ValueError("this tensor cannot be taken")
        super().landed(bucket)


class Rank(Worker):
    """A worker rank, told what to do as an engine's are."""

    def __init__(self, mood: Mood) -> None:
        super().__init__()
        self.mood = mood
        self.sink: _FailingSink = _FailingSink()
        self.fails = ""

    def receive(self, ticket: Ticket) -> None:
        import threading

        mood = self.mood
        module, _, name = ticket.receiver.partition(":")
        kind: Any = getattr(import_module(module), name)

        class Moody(kind):  # type: ignore[misc]
            def _listen(self, line: Any, limit: Any, seconds: float) -> Any:
                mood.sulk("silent")
                unheard: list[Any] = []
                while mood.how == "mute":
                    unheard += line.pump(0.1)
                    time.sleep(0.05)
                line._unread = unheard + line._unread  # what it has not listened to is there when it does
                return super()._listen(line, limit, seconds)

        self.sink = _FailingSink()
        self.sink.fails = self.fails
        self._receiver = Moody(ticket)
        self._thread = threading.Thread(target=self._receiver.run, args=(self.sink,))
        self._thread.start()

    def release(self) -> None:
        """Let go, as a worker of an engine does: it is not kept by a receiver that takes its time to end."""
        import threading

        self.sink.release()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.abort()
            threading.Thread(target=receiver.close).start()

    def fail(self, where: str) -> None:
        self.fails = where

    def apply(self) -> dict[str, str] | None:
        content = self.content()
        if self.fails == "apply":
            raise ValueError("these weights cannot be loaded")
        return content

    def finalize(self) -> None:
        if self.fails == "finalize":
            raise ValueError("these weights cannot be packed")

    def undo(self) -> None: ...


def rank(pipe: Connection, heard: Connection) -> None:
    """A worker process: does what it is asked to, one thing a time."""
    worker = Rank(Mood(heard))
    while True:
        number, order, argument = worker.mood.order(pipe)
        worker.mood.sulk("mute", "silent")
        try:
            answer = worker.ask(order, argument)
        except Exception as failure:  # noqa: BLE001 - it is answered, whatever it was
            answer = WorkerFailed(f"{order}: {failure}", operation=order, kind=type(failure).__name__).record()
        pipe.send((number, answer))


class Peer(Child):
    """A process that can be struck."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self.heard, theirs = _server.Pipe()
        super().__init__(target, theirs, *arguments)
        theirs.close()

    def strike(self, how: str) -> None:
        os.kill(self.pid, SIGNALS[how])
        if how in ("mute", "silent"):
            assert self.heard.poll(10), "it does not hear signals"
            self.heard.recv()

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def told(self, seconds: float = 15.0) -> Any:
        # Not in a thread: the engine needs those of the loop, and there are few.
        async with asyncio.timeout(seconds):
            while not self.pipe.poll():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()
        self.heard.close()


@asynccontextmanager
async def peer(target: Any, *arguments: Any) -> AsyncIterator[Peer]:
    made = await asyncio.to_thread(Peer, target, *arguments)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.end)


class RankBackend(SimulatedBackend):
    """A simulated engine whose one worker rank is a process: it dies with it, and cannot swap without it."""

    def __init__(self, versions: dict[str, int]) -> None:
        super().__init__(delays=Delays(step=0.005))
        self.specs = inventory(weights(0)).tensors
        self.content: dict[str, str] | None = None
        self.peer: Peer | None = None
        self._versions = versions
        self._asked: dict[int, asyncio.Future[Any]] = {}

    async def start(self, replica: str, incarnation: int) -> Booted:
        booted = await super().start(replica, incarnation)
        self.peer = await asyncio.to_thread(Peer, rank)
        asyncio.get_running_loop().add_reader(self.peer.pipe.fileno(), self._heard, self.peer)
        layout = tuple(replace(place, pid=self.peer.pid, device="cpu") for place in booted.layout)
        return replace(booted, layout=layout)

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        before = dict(self.live)
        if op.verb == "apply":
            # Whatever becomes of it, a token made now would show it.
            self.live[next(iter(self.live))] = self._versions[op.refit_id]
        mine = next((ticket for ticket in op.tickets if ticket.replica == self._name), None)
        answer = await self.ask(op.verb, mine)
        if isinstance(answer, ErrorRecord):
            if op.verb == "apply":
                self.live = before
            return [WorkerReply(0, touched=op.verb == "finalize", error=answer)]
        if op.verb == "apply":
            self.content = answer
            self.live = dict.fromkeys(self.live, self._versions[op.refit_id])
        return [WorkerReply(0, touched=op.verb in ("apply", "finalize"))]

    async def ask(self, order: str, argument: object = None) -> Any:
        if self.death is not None:
            raise self.death
        assert self.peer is not None
        number = len(self._asked)
        self._asked[number] = future = asyncio.get_running_loop().create_future()
        try:
            self.peer.pipe.send((number, "alive" if order == "describe" else order, argument))
        except OSError:
            self._gone(self.peer)
        return await future

    async def close(self) -> None:
        await super().close()
        if self.peer is not None:
            mine, self.peer = self.peer, None
            asyncio.get_running_loop().remove_reader(mine.pipe.fileno())
            await asyncio.to_thread(mine.end)

    def _heard(self, mine: Peer) -> None:
        try:
            number, answer = mine.pipe.recv()
        except (EOFError, OSError):
            self._gone(mine)
        else:
            if not self._asked[number].done():
                self._asked[number].set_result(answer)

    def _gone(self, mine: Peer) -> None:
        asyncio.get_running_loop().remove_reader(mine.pipe.fileno())
        self.die()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self.death or RemoteError("dead"))
                future.exception()
