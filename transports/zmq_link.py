"""The two ends of the control link as sockets: who owns one polls it with a deadline, and closes it without lingering.

A socket belongs to one thread at a time. Nothing here waits without a limit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Final, Literal

import zmq

from pitstop.engine.errors import LocalError, PeerLost, ProtocolViolation
from pitstop.transports.codec import encode, from_engine, raised
from pitstop.transports.deadline import BEAT_S, SILENCE_S, Limit, Silence
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

_SCHEME: Final = "ipc://"
_AT_ONCE: Final = 64
_LAST_WORDS_MS: Final = 50


def pid_space() -> int:
    """Return a number that two processes share if a process id means the same to both; 0 if that is not known."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
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
    except OSError:
        return None


class Line:
    """A client's end. Beats whenever it is pumped, and raises when the engine is gone."""

    def __init__(self, address: str, silence_s: float = SILENCE_S) -> None:
        self.address: Final = address
        self.peer: Final = f"engine at {address}"
        self.silence = Silence(silence_s)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = Lock()
        self._pidfd: int | None = None
        self._dead = False
        self._unread: list[FromEngine] = []  # what came with the Welcome
        self._beaten = 0.0
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise LocalError(f"{address!r} is not an address: {error.strerror}", address=address) from None

    def greet(self, role: Literal["trainer", "receiver"], limit: Limit, token: str = "") -> Welcome:
        """Say Hello and return what the engine answers.

        Raises:
            PeerLost: no answer in time.
            PitstopError: what the engine refuses with.
        """
        self.send(Hello(PROTOCOL, role, os.getpid(), pid_space(), token))
        welcome: Welcome | None = None
        while limit.left():
            for message in self._heard(min(limit.left(), BEAT_S)):
                if isinstance(message, Refuse):
                    raise raised(message.error)
                if isinstance(message, Welcome):
                    welcome = message
                else:
                    self._unread.append(message)
            if welcome is not None:
                self._watch(welcome)
                return welcome
        path = Path(self.address.removeprefix(_SCHEME))
        why = "" if path.exists() else " (no such socket: has the engine started?)"
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


class Hub:
    """The engine's end. Never blocks: what cannot be sent at once is not sent.

    `arrived` is called when sending has swallowed the news, which `fileno` gives only once, that something came.
    """

    def __init__(self, address: str, arrived: Callable[[], None]) -> None:
        if not address.startswith(_SCHEME):
            raise LocalError(f"{address!r} is not an address: this version knows {_SCHEME}<path>", address=address)
        self.address: Final = address
        self._arrived = arrived
        self._path = Path(address.removeprefix(_SCHEME))
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._bound = False
        try:
            self._socket.bind(address)
            self._bound = True
            self._path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise LocalError(f"{address} cannot be bound: {error.strerror}", address=address) from None

    def fileno(self) -> int:
        """A file descriptor that becomes readable, once, when there may be something to receive."""
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, peer: bytes, message: FromEngine) -> bool:
        """Send to one client; False if it is gone or reads nothing."""
        try:
            self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._arrived()
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return a client's identity and its frames, if something has come."""
        try:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return peer, frames

    def close(self) -> None:
        """Close at once and remove the socket's file. Idempotent."""
        if not self._context.closed:
            self._socket.close(0)
            self._context.term()
            if self._bound:
                self._path.unlink(missing_ok=True)
