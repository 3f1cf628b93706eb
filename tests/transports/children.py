"""Processes of the tests: a worker that receives, a trainer that publishes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from pitstop.engine.worker_ports import Bucket, Ticket
from pitstop.transports.draining import HostDrainer

# Children come from a server that has imported what takes seconds, and has no threads and no sockets.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "pitstop.transports.digest_kernels", "pitstop.transports.shared_memory"])


class Sink:
    """Takes what lands and says what it was. `live` is where it may be put."""

    def __init__(self) -> None:
        self.bucket: Bucket | None = None
        self.groups = 0
        self.live: dict[str, Any] = {}
        self.held = 0
        self.refuses = 0
        self._busy = threading.Lock()

    def places(self) -> dict[str, Any]:
        return self.live

    def hold(self) -> bool:
        if self.refuses:
            self.refuses -= 1
            return False
        assert self._busy.acquire(blocking=False)
        self.held += 1
        return True

    def let_go(self) -> None:
        self._busy.release()

    def landed(self, bucket: Bucket) -> None:
        for spec, tensor in bucket.tensors:
            assert spec.name not in self.live or tensor.data_ptr() == self.live[spec.name].data_ptr()
        before = () if self.bucket is None else self.bucket.tensors
        self.bucket = Bucket(bucket.refit_id, [*before, *bucket.tensors])
        self.groups += 1

    def apply(self) -> None: ...

    def finalize(self) -> None: ...

    def undo(self) -> None: ...

    def release(self) -> None:
        self.bucket, self.groups = None, 0

    def content(self) -> dict[str, str]:
        assert self.bucket is not None
        return {spec.name: sha(tensor) for spec, tensor in self.bucket.tensors}


def sha(tensor: Any) -> str:
    import torch

    flat = tensor.detach().contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.sha256(repr((str(tensor.dtype), tuple(tensor.shape))).encode() + raw).hexdigest()


class Worker:
    """A worker rank of this process: receives in a thread, answers questions about what landed."""

    def __init__(self) -> None:
        self.sink = Sink()
        self.pid = os.getpid()
        self._receiver: Any = None
        self._thread: threading.Thread | None = None

    def ask(self, order: str, argument: object = None) -> Any:
        return getattr(self, order)(*(() if argument is None else (argument,)))

    def receive(self, ticket: Ticket) -> None:
        module, _, name = ticket.receiver.partition(":")
        self._receiver = getattr(import_module(module), name)(ticket)
        self._thread = threading.Thread(target=self._receiver.run, args=(self.sink,))
        self._thread.start()

    def alive(self) -> bool:
        return True

    def content(self) -> dict[str, str] | None:
        assert self._thread is not None
        self._thread.join(30)
        return self.sink.content() if self.sink.bucket is not None else None

    def scribble(self) -> None:
        """Write into what landed, as a loader might."""
        assert self.sink.bucket is not None
        for _, tensor in self.sink.bucket.tensors:
            tensor.fill_(1)

    def groups(self) -> int:
        return self.sink.groups

    def dawdle(self, seconds: float) -> None:
        """Sleep before every bucket that is taken out of a ring, beating."""
        drain = HostDrainer.drain

        def slowly(drainer: HostDrainer, first: int, end: int) -> Iterator[int]:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.02)
                yield first
            yield from drain(drainer, first, end)

        HostDrainer.drain = slowly  # type: ignore[method-assign, assignment]

    def release(self) -> None:
        self.sink.release()
        if self._receiver is not None:
            self._receiver.close()

    def descriptors(self) -> list[str]:
        return descriptors()


def work(connection: Connection) -> None:
    """A worker process."""
    worker = Worker()
    while True:
        order, argument = connection.recv()
        connection.send(worker.ask(order, argument))


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


def train_rank(connection: Connection, address: str, rank: int, world_size: int, store: str, versions: int) -> None:
    """A rank that holds a share of the tensors: the others get theirs from it while they publish."""
    import random
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from pitstop.transports import Publisher
    from tests.transports.weights import weights

    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    pause = random.Random(rank)

    def gathered(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for owner, (name, whole) in enumerate(weights(version).items()):
            tensor = whole.contiguous() if owner % world_size == rank else torch.zeros_like(whole).contiguous()
            time.sleep(pause.uniform(0, 0.005))
            if tensor.numel():
                dist.broadcast(tensor.view(-1).view(torch.uint8), owner % world_size)
            yield name, tensor

    with Publisher.connect(address, rank=rank, world_size=world_size) as publisher:
        for version in range(1, versions + 1):
            time.sleep(pause.uniform(0, 0.05))
            handle = publisher.publish(gathered(version), weight_version=version)
            step = torch.ones(1)
            dist.all_reduce(step)
            report = handle.result(30)
            connection.send((report.outcome.value, report.refit_id, int(step)))
        connection.recv()
    dist.destroy_process_group()


def crawl(connection: Connection, address: str, options: dict[str, Any]) -> None:
    """A trainer that takes half a minute to send: it says when it has begun, so that a test can strike then."""
    from pitstop.engine.errors import PitstopError
    from pitstop.transports import Publisher
    from tests.transports.weights import slow

    with Publisher.connect(address) as publisher:
        handle = publisher.publish(slow(lambda: connection.send("sending")), weight_version=1, **options)
        try:
            handle.result(60)
        except PitstopError as error:
            connection.send(error.slug)


def leave(connection: Connection, address: str, how: str) -> None:
    """A trainer that ends in the middle of a send, without closing anything."""
    from pitstop.transports import Publisher
    from tests.transports.weights import slow

    publisher = Publisher.connect(address)
    begun = threading.Event()
    publisher.publish(slow(begun.set), weight_version=1)
    begun.wait(20)
    connection.send("sending")
    if how == "exception":
        raise SystemExit(3)


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

    def ask(self, order: str, argument: object = None) -> Any:
        self.pipe.send((order, argument))
        return self.answer()

    def alive(self) -> bool:
        return self.process.is_alive()

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
