"""The control link on TCP: whoever holds the run's key gets in, nobody else, and everybody is told why in time."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine.errors import AccessDenied, KeyUnreadable, LocalError, PeerLost
from pitstop.engine.refit import Outcome
from pitstop.transports import Publisher, negotiation
from pitstop.transports.address import Address, parsed
from pitstop.transports.codec import encode
from pitstop.transports.control import ControlLink
from pitstop.transports.deadline import Limit
from pitstop.transports.keys import ClientKey, ServerKey, client_key, decoded, keys_of
from pitstop.transports.messages import PROTOCOL, Hello
from pitstop.transports.zmq_link import Line
from tests.transports.children import Worker, descriptors
from tests.transports.rig import Rig, rig, until
from tests.transports.test_publisher import settled, shas
from tests.transports.weights import weights

ANY_PORT = "tcp://127.0.0.1:0"


def tcp(engine: Rig) -> Address:
    assert engine.link.tcp_address is not None
    return parsed(engine.link.tcp_address)


def at(engine: Rig, key: Path) -> str:
    return str(replace(tcp(engine), key=key))


@contextmanager
def bare(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A client without any key."""
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close(0)
        context.term()


# -- addresses and keys ----------------------------------------------------------------------------------------


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), st.integers(0, 65535))
def test_an_address_survives_being_written_and_read(name: str, port: int) -> None:
    address = Address(f"tcp://127.0.0.1:{port}", Path("/") / name)
    assert parsed(str(address)) == address
    assert str(address).isascii()


@pytest.mark.parametrize(
    "wrong",
    ["tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://a b:1", "tcp://127.0.0.1:1?key=a&lock=b", "udp://a:1", "", "ipc://",
     "tcp://127.0.0.1:1?key="],
)  # fmt: skip
def test_what_is_no_address_is_said(wrong: str) -> None:
    with pytest.raises(LocalError, match="not an address"):
        parsed(wrong)


@given(st.text() | st.binary())
def test_no_file_makes_reading_a_key_do_more_than_raise(content: str | bytes) -> None:
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    with pytest.raises(KeyUnreadable):
        decoded(raw, ClientKey, "client.key")


@given(st.text("0123456789abcXYZ#%$~\"' ", min_size=38, max_size=42))
def test_a_key_is_forty_characters_that_mean_thirty_two_bytes(text: str) -> None:
    raw = msgspec.json.encode({"public": text, "secret": text})
    try:
        assert decoded(raw, ServerKey, "k").public == text
    except KeyUnreadable:
        return
    assert len(text) == 40


def test_keys_are_private_made_once_and_fit_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    server, client = keys_of(folder)
    assert keys_of(folder) == (server, client)
    assert client.server == server.public
    assert client_key(folder / "client.key") == client
    for path in (folder, *folder.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    assert sorted(os.listdir(folder)) == ["client.key", "server.key"]


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    keys_of(tmp_path)
    (tmp_path / "client.key").chmod(0o640)
    with pytest.raises(KeyUnreadable, match=r"client\.key .*chmod 600"):
        client_key(tmp_path / "client.key")
    with pytest.raises(KeyUnreadable):
        keys_of(tmp_path)


# -- the link --------------------------------------------------------------------------------------------------


async def test_weights_travel_by_shared_memory_however_the_trainer_connected(tmp_path: Path) -> None:
    async with rig(tmp_path, listen=ANY_PORT) as engine:
        assert engine.link.tcp_address == f"{tcp(engine).endpoint}?key={tmp_path}/client.key"
        trainer = await asyncio.to_thread(Publisher.connect, engine.link.tcp_address)
        assert trainer.transport == "shared_memory"
        worker = Worker()
        handle = trainer.publish(weights(1), weight_version=1)
        await engine.refit(await engine.offer(), [worker], release=False)
        assert await asyncio.to_thread(worker.content) == shas(weights(1))
        assert (await settled(handle)).outcome is Outcome.COMMITTED
        await asyncio.to_thread(worker.release)
        await asyncio.to_thread(trainer.close)
        local = await asyncio.to_thread(Publisher.connect, engine.link.address)
        await asyncio.to_thread(local.close)
        assert not engine.link.violations


@pytest.mark.parametrize("whose", ["server", "client"])
async def test_a_wrong_key_is_refused_in_time_and_nothing_else_happens(tmp_path: Path, whose: str) -> None:
    keys_of(tmp_path / "other")
    async with rig(tmp_path, listen=ANY_PORT) as engine:
        right, other = client_key(tmp_path / "client.key"), client_key(tmp_path / "other/client.key")
        wrong = msgspec.structs.replace(other, server=right.server) if whose == "client" else other
        forged = tmp_path / "forged.key"
        forged.touch(0o600)
        forged.write_bytes(msgspec.json.encode(wrong))
        began, before = time.monotonic(), descriptors()
        with pytest.raises(AccessDenied, match=r"forged\.key") as caught:
            await asyncio.to_thread(Publisher.connect, at(engine, forged))
        assert time.monotonic() - began < 5
        assert str(forged) == caught.value.fields["key"]
        assert descriptors() == before
        assert not engine.link._clients
        assert not engine.link.violations
        assert bool(engine.link.denied) == (whose == "client")
        trainer = await asyncio.to_thread(Publisher.connect, at(engine, tmp_path / "client.key"))
        await asyncio.to_thread(trainer.close)


async def test_a_client_without_a_key_is_not_heard(tmp_path: Path) -> None:
    async with rig(tmp_path, listen=ANY_PORT) as engine:
        with bare(tcp(engine).endpoint) as socket:
            socket.send(encode(Hello(PROTOCOL, "trainer", 0, 0)))
            assert not await asyncio.to_thread(socket.poll, 500)
        assert not engine.link._clients
        assert not engine.link.violations


async def test_a_missing_key_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    async with rig(tmp_path, listen=ANY_PORT) as engine:
        with pytest.raises(KeyUnreadable, match=r"\?key="):
            Publisher.connect(tcp(engine).endpoint)
        with pytest.raises(KeyUnreadable, match="nowhere"):
            Publisher.connect(at(engine, tmp_path / "nowhere"))
        (tmp_path / "empty").touch(0o600)
        with pytest.raises(KeyUnreadable, match="not a key"):
            Publisher.connect(at(engine, tmp_path / "empty"))


async def test_nobody_at_a_tcp_address_is_said_in_time(tmp_path: Path) -> None:
    async with rig(tmp_path / "run", listen=ANY_PORT) as engine:
        gone = engine.link.tcp_address
        keys_of(tmp_path)
    assert gone is not None
    with pytest.raises(PeerLost, match="no answer"):
        await asyncio.to_thread(lambda: Publisher.connect(gone, timeout=0.3))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "ipc:///x", "tcp://127.0.0.1", "tcp://127.0.0.1:0?key=x"])
def test_what_cannot_be_listened_on_is_said_at_once(tmp_path: Path, listen: str) -> None:
    with pytest.raises(LocalError, match="not an address"):
        ControlLink(f"ipc://{tmp_path}/s", run_id="", on_offer=lambda _: None, listen=listen)


async def test_a_port_without_a_host_is_the_loopbacks(tmp_path: Path) -> None:
    async with rig(tmp_path, listen="tcp://:0") as engine:
        assert tcp(engine).endpoint.startswith("tcp://127.0.0.1:")


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async with rig(tmp_path / "a", listen=ANY_PORT) as engine:
        link = ControlLink(
            f"ipc://{tmp_path}/b/s", run_id="", on_offer=lambda _: None, listen=tcp(engine).endpoint
        )  # fmt: skip
        with pytest.raises(LocalError, match=r"tcp://.* cannot be bound: Address already in use"):
            await link.run()


async def test_a_client_of_one_socket_cannot_take_the_name_of_one_of_the_other(tmp_path: Path) -> None:
    async with rig(tmp_path, listen=ANY_PORT) as engine:
        lines = []
        for address in (engine.link.address, at(engine, tmp_path / "client.key")):
            line = Line(address)
            line._socket.setsockopt(zmq.ROUTING_ID, b"twin")
            lines.append(line)
            await asyncio.to_thread(line.greet, "trainer", Limit(5))
        # The name was set after connecting, so it may count from the next connection on: two clients either way.
        await until(lambda: len(engine.link._clients) == 2)
        for line in lines:
            line.close()


async def test_an_engine_on_another_host_is_named_as_the_reason(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        line = Line(engine.link.address)
        welcome = await asyncio.to_thread(line.greet, "trainer", Limit(5))
        line.close()
    far = msgspec.structs.replace(welcome, pid_space=welcome.pid_space + 1)
    with pytest.raises(LocalError, match=r"no transport .* shared_memory: .* another host"):
        negotiation.negotiate(far, "tcp://far:1")
