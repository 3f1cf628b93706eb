"""The control link against clients that do what they like, and publishers against engines that do."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from pitstop.engine.errors import LocalError, PeerLost, PitstopError, ProtocolViolation
from pitstop.engine.worker_ports import Manifest, Ticket
from pitstop.transports import Publisher
from pitstop.transports.codec import encode, from_client, from_engine
from pitstop.transports.control import ControlLink
from pitstop.transports.messages import (
    PROTOCOL,
    Accept,
    Beat,
    Bye,
    FromEngine,
    Hello,
    Noted,
    Propose,
    Refuse,
    Report,
    Row,
    Sent,
    Welcome,
)
from pitstop.transports.segment import Probe
from pitstop.transports.shared_memory import RECEIVER
from pitstop.transports.zmq_link import pid_space, pidfd
from tests.transports.children import Worker
from tests.transports.rig import Rig, rig
from tests.transports.weights import weights

HELLO = Hello(PROTOCOL, "trainer", 0, 0)


class Raw:
    """A client that sends whatever bytes it is told to."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def hear(self) -> FromEngine:
        while True:
            assert self._socket.poll(10_000), "nothing came"
            message = from_engine(self._socket.recv())
            if not isinstance(message, Beat):
                return message

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@contextmanager
def raw(engine: Rig) -> Iterator[Raw]:
    client = Raw(engine.link.address)
    try:
        yield client
    finally:
        client.close()


async def refused(client: Raw, *frames: bytes) -> str:
    client.send(*frames)
    answer = await asyncio.to_thread(client.hear)
    assert isinstance(answer, Refuse)
    return answer.error.message


async def test_a_hello_is_answered_with_what_a_client_has_to_know(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        with raw(engine) as client:
            client.send(encode(HELLO))
            welcome = await asyncio.to_thread(client.hear)
        assert isinstance(welcome, Welcome)
        assert (welcome.protocol, welcome.run_id, welcome.weight_version) == (PROTOCOL, "run-1", 3)
        assert (welcome.pid, welcome.pid_space, welcome.transports) == (os.getpid(), pid_space(), ("shared_memory",))
        socket = tmp_path / "control.sock"
        assert stat.S_IMODE(os.stat(socket).st_mode) == 0o600
    assert "control.sock" not in os.listdir(tmp_path)


async def test_a_missing_run_directory_is_made_private(tmp_path: Path) -> None:
    async with rig(tmp_path / "run"):
        assert stat.S_IMODE(os.stat(tmp_path / "run").st_mode) == 0o700


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc:///" + "x" * 200, "control.sock"])
async def test_an_address_that_cannot_be_bound_is_said(address: str) -> None:
    with pytest.raises(LocalError, match=r"address|cannot be bound"):
        await ControlLink(address, run_id="", on_offer=lambda _: None).run()


async def test_what_is_not_understood_is_refused_counted_and_forgotten(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        with raw(engine) as client:
            assert "not a message" in await refused(client, b"GET / HTTP/1.1")
            assert "has not said Hello" in await refused(client, encode(Sent("r", b"")))
            old = Hello(PROTOCOL + 1, "trainer", 0, 0)
            assert f"this engine speaks {PROTOCOL}" in await refused(client, encode(old))
            assert "not asked for" in await refused(client, encode(Hello(PROTOCOL, "receiver", 0, 0, "guess")))
            assert "2 frames" in await refused(client, encode(HELLO), b"more")
            client.send(encode(HELLO))
            assert isinstance(await asyncio.to_thread(client.hear), Welcome)
            assert "second Hello" in await refused(client, encode(HELLO))
            assert "not offered" in await refused(client, encode(Sent("r", b"")))
            assert "from a trainer" in await refused(client, encode(Report("r", "attached")))
            huge = Propose("r", 1, (Row("a", "int8", (1 << 61,)),))
            client.send(encode(huge))
            answer = await asyncio.to_thread(client.hear)
            assert isinstance(answer, Refuse)
            assert (answer.refit_id, answer.error.slug) == ("r", "protocol_violation")
        assert engine.link.violations == 8
        assert engine.offers.empty()


async def test_a_client_that_keeps_at_it_is_dropped_and_its_offers_fail(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        with raw(engine) as client:
            client.send(encode(HELLO))
            await asyncio.to_thread(client.hear)
            client.send(encode(Propose("r", 1, (Row("a", "int8", (3,)),))))
            sending = await engine.offer()
            for _ in range(16):
                await refused(client, b"noise")
            with pytest.raises(ProtocolViolation):
                await sending.send(Manifest(()), [])
            assert "has not said Hello" in await refused(client, encode(Sent("r", b"")))


async def test_two_trainers_cannot_share_a_refit(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        with raw(engine) as one, raw(engine) as two:
            for client in (one, two):
                client.send(encode(HELLO))
                await asyncio.to_thread(client.hear)
            offer = encode(Propose("r", 1, (Row("a", "int8", (3,)),)))
            one.send(offer)
            await engine.offer()
            assert "another trainer" in await refused(two, offer)


async def test_a_large_offer_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    rows = tuple(Row(f"model.layers.{n}.mlp.experts.gate_proj.weight", "bfloat16", (4096, 1024)) for n in range(40_000))
    frame = encode(Propose("r", 1, rows))
    async with rig(tmp_path) as engine:
        with raw(engine) as client:
            client.send(encode(HELLO))
            await asyncio.to_thread(client.hear)
            client.send(frame)
            sending = await engine.offer()
    assert len(sending.offer.tensors) == 40_000
    assert sending.offer.tensors[-1].shape == (4096, 1024)


async def prepared(engine: Rig, refit_id: str = "r") -> tuple[Raw, Ticket]:
    """An accepted refit with one ticket, and a raw client in its receiver's place."""
    with raw(engine) as trainer:
        trainer.send(encode(HELLO))
        await asyncio.to_thread(trainer.hear)
        rows = tuple(Row(s.name, s.dtype, s.shape) for s in engine.model.tensors)  # type: ignore[arg-type]
        trainer.send(encode(Propose(refit_id, 1, rows)))
        sending = await engine.offer()
    (ticket,) = await engine.plan(sending, [Worker()])
    return Raw(engine.link.address), ticket


async def test_a_ticket_lets_one_receiver_in_once_and_not_after_the_refit(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        client, ticket = await prepared(engine)
        hello = encode(Hello(PROTOCOL, "receiver", 0, 0, ticket.token))
        client.send(hello)
        assert isinstance(await asyncio.to_thread(client.hear), Welcome)
        with raw(engine) as second:
            assert "not asked for" in await refused(second, hello)
        client.close()
        client, ticket = await prepared(engine, "s")
        await engine.transport.release("s")
        hello = encode(Hello(PROTOCOL, "receiver", 0, 0, ticket.token))
        assert "no longer is" in await refused(client, hello)
        client.close()


async def test_a_receiver_reports_in_order_and_only_about_its_own_refit(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        client, ticket = await prepared(engine)
        client.send(encode(Hello(PROTOCOL, "receiver", 0, 0, ticket.token)))
        await asyncio.to_thread(client.hear)
        assert "reports landed" in await refused(client, encode(Report("r", "landed", 1)))
        assert "not r" in await refused(client, encode(Report("other", "attached")))
        client.send(encode(Report("r", "attached")))
        client.send(encode(Report("r", "landed", 7, 0.5, holds=True)))
        assert await asyncio.to_thread(client.hear) == Noted("r")
        (over,) = await engine.ended("r", 1)
        assert (over.kind, over.replica, over.rank, over.nbytes, over.seconds) == ("landed", "r0", 0, 7, 0.5)
        client.close()


async def test_shutting_down_does_not_wait_for_anybody(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        client = Raw(engine.link.address)
        client.send(encode(HELLO))
        await asyncio.to_thread(client.hear)
        # It reads nothing any more, and the queue to it fills up.
        for _ in range(5000):
            for peer in engine.link._clients.values():
                peer.post(Beat())
        began = time.monotonic()
    assert time.monotonic() - began < 5
    client.close()


def test_a_process_that_cannot_be_meant_is_not_watched() -> None:
    assert pidfd(os.getpid(), pid_space() + 1) is None
    assert pidfd(0, pid_space()) is None
    with pytest.raises(PeerLost):
        pidfd(2**22 - 1, pid_space())


# -- engines that do what they like --------------------------------------------------------------------------


class Engine(threading.Thread):
    """Answers Hello, then whatever `answer` says; `mute` says nothing at all, not even beats."""

    def __init__(self, address: str, answer: Callable[[Any], FromEngine | bytes | None], *, mute: bool = False) -> None:
        super().__init__(daemon=True)
        self.probe = Probe()
        self.over = threading.Event()
        self._answer = answer
        self._mute = mute
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self.start()

    def run(self) -> None:
        welcome = Welcome(
            PROTOCOL, "fake", os.getpid(), pid_space(), self.probe.path, self.probe.nonce, ("shared_memory",)
        )
        while not self.over.is_set():
            if not self._socket.poll(50):
                continue
            peer, frame = self._socket.recv_multipart()
            message = from_client(frame)
            answer = welcome if isinstance(message, Hello) else self._answer(message)
            if answer is None and not self._mute:
                answer = Beat()
            if answer is not None:
                self._socket.send_multipart([peer, answer if isinstance(answer, bytes) else encode(answer)])
        self._socket.close(0)
        self._context.term()
        self.probe.close()


@contextmanager
def engine_that(
    folder: Path, answer: Callable[[Any], FromEngine | bytes | None], *, mute: bool = False
) -> Iterator[Publisher]:
    address = f"ipc://{folder}/fake.sock"
    engine = Engine(address, answer, mute=mute)
    try:
        with Publisher.connect(address) as publisher:
            yield publisher
    finally:
        engine.over.set()
        engine.join(5)


def test_a_silent_engine_is_lost_in_time(tmp_path: Path) -> None:
    with engine_that(tmp_path, lambda _: None, mute=True) as publisher:
        handle = publisher.publish(weights(1), weight_version=1, deadlines={"silence": 1.0})
        with pytest.raises(PeerLost, match="said nothing for 1 s"):
            handle.result(10)
        assert handle.sent.is_set()


def test_an_engine_that_beats_is_waited_for(tmp_path: Path) -> None:
    with engine_that(tmp_path, lambda _: None) as publisher:
        handle = publisher.publish(weights(1), weight_version=1, deadlines={"silence": 1.0})
        with pytest.raises(TimeoutError):
            handle.result(2.5)
        assert not handle.done()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xc1", ProtocolViolation),
        (Noted("r"), ProtocolViolation),
        (Bye(), PeerLost),
        (Accept("{id}", "/proc/1/fd/1", 4096, b"", b"\x63", b"", 5.0), ProtocolViolation),
        (Accept("{id}", "/etc/passwd", 4096, bytes(8), b"\x00", bytes(8), 5.0), LocalError),
        (Accept("{id}", "/proc/1/fd/1", 4096, (9).to_bytes(8, "little"), b"\x00", bytes(8), 5.0), ProtocolViolation),
    ],
    ids=["noise", "not to a trainer", "bye", "odd rows", "no segment", "no such tensor"],
)
def test_an_engine_that_talks_nonsense_ends_the_publish(
    tmp_path: Path, answer: FromEngine | bytes, error: type[PitstopError]
) -> None:
    def say(message: Any) -> FromEngine | bytes | None:
        if isinstance(message, Propose):
            if isinstance(answer, Accept):
                return Accept(message.refit_id, *(getattr(answer, f) for f in answer.__struct_fields__[1:]))
            return answer
        return Refuse(message.error, message.refit_id) if hasattr(message, "error") else None

    with engine_that(tmp_path, say) as publisher:
        handle = publisher.publish({"a": weights(1)["layer.bias"]}, weight_version=1)
        with pytest.raises(error):
            handle.result(10)
        assert handle.sent.is_set()


def to_reports(answer: FromEngine | None, message: object) -> FromEngine | None:
    return answer if isinstance(message, Report) else None


async def test_a_receiver_gives_up_on_a_silent_engine_and_on_a_dead_one(tmp_path: Path) -> None:
    for mute, answer in ((True, None), (False, Bye())):
        folder = tmp_path / str(mute)
        folder.mkdir()
        engine = Engine(f"ipc://{folder}/fake.sock", partial(to_reports, answer), mute=mute)
        worker = Worker()
        ticket = Ticket(
            "r", "r0", 1, 0, RECEIVER, engine.probe.path, 32, (), f"ipc://{folder}/fake.sock", "t", 20.0, 0.6
        )  # fmt: skip
        worker.receive(ticket)
        thread = worker._thread
        assert thread is not None
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
        assert worker.sink.bucket is None
        await asyncio.to_thread(worker.release)
        engine.over.set()
        engine.join(5)
