"""A client's end of the control link as a socket: polled with a deadline, and closed without lingering.

A socket belongs to one thread at a time. Nothing here waits without a limit.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from time import monotonic
from typing import Final, Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from pitstop.engine.errors import AccessDenied, InvalidRequest, KeyUnreadable, LocalError, PeerLost, ProtocolViolation
from pitstop.transports.address import parsed
from pitstop.transports.codec import encode, from_engine, raised
from pitstop.transports.deadline import BEAT_S, SILENCE_S, Limit, Silence
from pitstop.transports.keys import client_key
from pitstop.transports.messages import (
    MOST_BYTES,
    PROTOCOL,
    Beat,
    Bye,
    FromClient,
    FromEngine,
    Hello,
    Refuse,
    Welcome,
)

_AT_ONCE: Final = 64
_LAST_WORDS_MS: Final = 50
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_MOST_BROKEN: Final = 3  # handshakes that a peer ended without a word
_REFUSED: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LONGEST_GROUP: Final = 64
_BROKEN: Final = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of a trainer's ranks a client is. `group` keeps the ranks of several trainers apart."""

    rank: int = 0
    world_size: int = 1
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or len(self.group) > _LONGEST_GROUP:
            raise InvalidRequest(f"rank {self.rank} of {self.world_size}, group {self.group!r}: no such rank")


_ALONE: Final = Rank()


def pid_space() -> int:
    """Return a number that two processes share if a process id means the same to both; 0 if that is not known."""
    with contextlib.suppress(OSError):
        # The first namespace has the same number on every host.
        with open(_BOOT_ID, "rb") as file:
            where = b"%b %d" % (file.read().strip(), os.stat("/proc/self/ns/pid").st_ino)
        return int.from_bytes(blake2b(where, digest_size=7).digest()) or 1
    return 0


def pidfd(pid: int, space: int) -> int | None:
    """Return a file descriptor that becomes readable when a process dies; None if it cannot be watched from here.

    Raises:
        PeerLost: it is dead.
    """
    if pid <= 0 or not space or space != pid_space():
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerLost(f"process {pid} is dead", peer=f"process {pid}") from None
    except (OSError, OverflowError):
        return None


class Line:
    """A client's end. Beats whenever it is pumped, and raises when the engine is gone."""

    def __init__(self, address: str, silence_s: float = SILENCE_S) -> None:
        where = parsed(address)
        self.address: Final = address
        self.peer: Final = f"engine at {where.endpoint}"
        self.silence = Silence(silence_s)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = Lock()
        self._pidfd: int | None = None
        self._where = where
        self._monitor: zmq.Socket[bytes] | None = None
        self._broken = 0
        self._dead = False
        self._unread: list[FromEngine] = []  # what came with the Welcome
        self._beaten = 0.0
        try:
            if where.path is None:
                self._unlock()
            self._socket.connect(where.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise LocalError(f"{address!r} is not an address: {error.strerror}", address=address) from None
        except BaseException:
            self.close()
            raise

    def greet(
        self, role: Literal["trainer", "receiver"], limit: Limit, token: str = "", rank: Rank = _ALONE
    ) -> Welcome:
        """Say Hello and return what the engine answers.

        Raises:
            PeerLost: no answer in time.
            AccessDenied: the engine does not accept the key.
            PitstopError: what the engine refuses with.
        """
        self.send(Hello(PROTOCOL, role, os.getpid(), pid_space(), token, rank.rank, rank.world_size, rank.group))
        welcome: Welcome | None = None
        while limit.left():
            messages = self._heard(min(limit.left(), BEAT_S))
            self._let_in()
            for message in messages:
                if isinstance(message, Refuse):
                    raise raised(message.error)
                if isinstance(message, Welcome):
                    welcome = message
                else:
                    self._unread.append(message)
            if welcome is not None:
                self._watch(welcome)
                self._unmonitor()
                return welcome
        path = self._where.path
        why = "" if path is None or path.exists() else " (no such socket: has the engine started?)"
        raise PeerLost(f"no answer from {self.peer} in {limit.seconds:g} s{why}", peer=self.peer, seconds=limit.seconds)

    def send(self, message: FromClient) -> None:
        """Queue a message.

        Raises:
            PeerLost: the queue is full: the engine reads nothing.
            ProtocolViolation: the message is too large.
        """
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerLost(f"{self.peer} takes no messages: {error.strerror}", peer=self.peer) from None

    def pump(self, seconds: float) -> list[FromEngine]:
        """Wait up to `seconds` (and no longer than a beat) for messages; beat if a beat is due. `wake` ends the wait.

        Raises:
            PeerLost: the engine died or closed its link; everything it said before that has been returned.
            ProtocolViolation: what came is no message of an engine.
        """
        if monotonic() - self._beaten >= BEAT_S:
            self._beaten = monotonic()
            with contextlib.suppress(PeerLost):  # a full queue is silence, and silence has its own limit
                self.send(Beat())
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        return self._heard(min(seconds, BEAT_S))

    @property
    def gone(self) -> bool:
        """Whether the engine has died or closed its link."""
        return self._dead

    def wake(self) -> None:
        """End the wait of `pump`, from any thread."""
        with self._closing:
            if self._wakes >= 0:
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Close at once; what was queued and has not left yet is dropped. Idempotent."""
        if not self._context.closed:
            self._unmonitor()
            self._socket.close(0)
            self._context.term()
            with self._closing:
                os.close(self._wakes)
                self._wakes = -1
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _heard(self, seconds: float) -> list[FromEngine]:
        self._wait(seconds)
        messages = self._received()
        if self._dead and not messages and self._socket.poll(_LAST_WORDS_MS):
            messages = self._received()
        if messages:
            self.silence.heard()
        if Bye() in messages:
            self._dead = True
            messages = messages[: messages.index(Bye())]
        if self._dead and not messages:
            raise PeerLost(f"{self.peer} is gone", peer=self.peer)
        return [message for message in messages if not isinstance(message, Beat)]

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakes, zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        if self._pidfd is not None:
            poller.register(self._pidfd, zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(seconds * 1000))))
        if self._wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakes)
        if self._pidfd in ready:
            self._dead = True

    def _received(self) -> list[FromEngine]:
        messages: list[FromEngine] = []
        while len(messages) < _AT_ONCE:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 1:
                raise ProtocolViolation(f"{len(frames)} frames from {self.peer}", peer=self.peer)
            messages.append(from_engine(frames[0]))
        return messages

    def _watch(self, welcome: Welcome) -> None:
        if self._pidfd is None:
            self._pidfd = pidfd(welcome.pid, welcome.pid_space)

    def _unlock(self) -> None:
        if self._where.key is None:
            raise KeyUnreadable(
                f"{self.address} names no key: a TCP address ends in ?key=<path of the run's client.key>"
            )
        key = client_key(self._where.key)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
        self._monitor = self._socket.get_monitor_socket(_REFUSED | _BROKEN)

    def _unmonitor(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def _let_in(self) -> None:
        """Raise `AccessDenied` if the engine, or whoever is there, ends the handshake instead of finishing it."""
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            # Who is shown a key that was made for another engine hangs up without a word, as does one that is dying.
            self._broken += event == _BROKEN
            if event != _BROKEN or self._broken >= _MOST_BROKEN:
                raise AccessDenied(
                    f"{self.peer} does not accept the key {self._where.key}: was it made by another run?",
                    peer=self.peer, key=str(self._where.key),
                )  # fmt: skip
