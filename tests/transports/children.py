"""Processes of the tests: a worker that receives, a trainer that publishes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from pitstop.engine.worker_ports import Bucket, Ticket

# Children come from a server that has imported what takes seconds, and has no threads and no sockets.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "pitstop.transports.digest_kernels", "pitstop.transports.shared_memory"])


class Sink:
    """Takes what lands and says what it was."""

    def __init__(self) -> None:
        self.bucket: Bucket | None = None

    def landed(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def apply(self) -> None: ...

    def finalize(self) -> None: ...

    def undo(self) -> None: ...

    def release(self) -> None:
        self.bucket = None

    def content(self) -> dict[str, str]:
        assert self.bucket is not None
        return {spec.name: sha(tensor) for spec, tensor in self.bucket.tensors}


def sha(tensor: Any) -> str:
    import torch

    flat = tensor.detach().contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.sha256(repr((str(tensor.dtype), tuple(tensor.shape))).encode() + raw).hexdigest()


def work(connection: Connection) -> None:
    """A worker process: receives in a thread, answers questions about what landed."""
    from pitstop.transports.shared_memory import SegmentReceiver

    sink, receiver, thread = Sink(), None, None
    while True:
        order, argument = connection.recv()
        answer: Any = None
        if order == "receive":
            receiver = SegmentReceiver(argument)
            thread = threading.Thread(target=receiver.run, args=(sink,))
            thread.start()
        elif order == "content":
            assert thread is not None
            thread.join(30)
            answer = sink.content() if sink.bucket is not None else None
        elif order == "scribble":
            # A loader that writes into what it was given.
            assert sink.bucket is not None
            sink.bucket.tensors[0][1].fill_(3)
        elif order == "release":
            sink.release()
            if receiver is not None:
                receiver.close()
        elif order == "descriptors":
            answer = descriptors()
        elif order == "stop":
            connection.send(None)
            return
        connection.send(answer)


def descriptors() -> list[str]:
    """Open files of this process that matter: segments, sockets' files, descriptors of processes."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "pitstop" in target or "pidfd" in target or "eventfd" in target:
            found.append(target)
    return sorted(found)


def train(connection: Connection, address: str, orders: list[tuple[int, dict[str, Any]]]) -> None:
    """A trainer process: publishes a version a time, whenever it is told to go on."""
    from pitstop.engine.errors import PitstopError
    from pitstop.transports import Publisher
    from tests.transports.weights import weights

    with Publisher.connect(address) as publisher:
        for version, options in orders:
            connection.recv()
            handle = publisher.publish(weights(version).items(), weight_version=version, **options)
            connection.send(handle.refit_id)
            try:
                report = handle.result(60)
            except PitstopError as error:
                connection.send((error.slug, error.message, dict(error.fields)))
            else:
                connection.send((report.outcome.value, report.transport, report.weight_version))
            assert handle.sent.is_set()


def crawl(connection: Connection, address: str, options: dict[str, Any]) -> None:
    """A trainer that is slow to send: it says where it is, so that a test can strike in the middle."""
    from pitstop.engine.errors import PitstopError
    from pitstop.transports import Publisher
    from pitstop.transports.sources import TensorSource
    from tests.transports.weights import weights

    pack = TensorSource.pack

    def slowly(self: TensorSource, *arguments: Any) -> Iterator[int]:
        connection.send("sending")
        for _ in range(600):
            threading.Event().wait(0.05)
            yield 0
        yield from pack(self, *arguments)

    TensorSource.pack = slowly  # type: ignore[method-assign]
    with Publisher.connect(address) as publisher:
        handle = publisher.publish(weights(1).items(), weight_version=1, **options)
        try:
            handle.result(60)
        except PitstopError as error:
            connection.send(error.slug)


class Child:
    """A process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = _server.Pipe()
        self.process = _server.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, order: str, argument: object = None, timeout: float = 60.0) -> Any:
        self.pipe.send((order, argument))
        return self.answer(timeout)

    def answer(self, timeout: float = 60.0) -> Any:
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"no answer from process {self.pid}")
        return self.pipe.recv()

    def receive(self, ticket: Ticket) -> None:
        self.ask("receive", ticket)


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    made = Child(target, *arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.join(10)
        made.pipe.close()
