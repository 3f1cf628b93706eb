"""The engine's end of the control link as sockets: one on a file, and one on TCP where that was asked for.

On TCP everything is encrypted, and only clients that hold the run's key get as far as a message (CURVE). Keys are
checked here, by the reader of the link, not in another thread; were it not running, nobody would get in.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from pitstop.engine.errors import LocalError
from pitstop.transports.address import Address, parsed
from pitstop.transports.codec import encode
from pitstop.transports.keys import CLIENT_FILE, keys_of
from pitstop.transports.messages import MOST_BYTES, FromEngine

_LOG: Final = logging.getLogger(__name__)
_ZAP: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"pitstop"
_ZAP_FRAMES: Final = 7
_AT_ONCE: Final = 32


class Hub:
    """Never blocks: what cannot be sent at once is not sent.

    `arrived` is called when sending has swallowed the news, which `filenos` give only once, that something came.
    `keys` is the folder of the keys of `listen`, by default the one of the socket's file.
    """

    def __init__(
        self, address: str, arrived: Callable[[], None], listen: str | None = None, keys: Path | None = None
    ) -> None:
        path = parsed(address).path
        if path is None:
            raise LocalError(f"{address!r} is not an address of a socket's file: ipc://<path>", address=address)
        self.denied = 0  #: clients with a wrong key
        self.tcp_address: str | None = None
        self._arrived = arrived
        self._path = path
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._zap: zmq.Socket[bytes] | None = None
        self._known = b""
        self._bound = False
        try:
            self._bind(address)
            self._bound = True
            self._path.chmod(0o600)
            if listen is not None:
                self.tcp_address = str(self._listen(listen, keys or self._path.parent))
        except (zmq.ZMQError, OSError) as error:
            self.close()
            where = listen if self._bound else address
            raise LocalError(f"{where} cannot be bound: {error.strerror}", address=where) from None
        except BaseException:
            self.close()
            raise

    def filenos(self) -> Sequence[int]:
        """File descriptors that become readable, once, when there may be something to receive."""
        every = [*self._sockets, *([] if self._zap is None else [self._zap])]
        return [int(one.getsockopt(zmq.FD)) for one in every]

    def send(self, peer: bytes, message: FromEngine) -> bool:
        """Send to one client; False if it is gone or reads nothing."""
        at = self._sockets[peer[0]]
        try:
            at.send_multipart([peer[1:], encode(message)], zmq.NOBLOCK)
            if int(at.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._arrived()
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return a client's identity and its frames, if something has come."""
        self._judge()
        for number, at in enumerate(self._sockets):
            try:
                peer, *frames = at.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                continue
            # A client may choose its name: so that it cannot choose one of the other socket.
            return bytes([number]) + peer, frames
        return None

    def close(self) -> None:
        """Close at once and remove the socket's file. Idempotent."""
        if not self._context.closed:
            for at in self._sockets:
                at.close(0)
            if self._zap is not None:
                self._zap.close(0)
            self._context.term()
            if self._bound:
                self._path.unlink(missing_ok=True)

    def _router(self) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._sockets.append(made)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        made.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        return made

    def _bind(self, endpoint: str) -> None:
        self._router().bind(endpoint)

    def _listen(self, endpoint: str, folder: Path) -> Address:
        server, client = keys_of(folder)
        self._known = z85.decode(client.public)
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP)
        router = self._router()
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, server.secret.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without this, libzmq lets everybody in when nobody answers for the keys.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        router.bind(f"tcp://{'*' if host == '0.0.0.0' else host}:{port}")
        bound = bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode().rpartition(":")[2]
        name = socket.gethostname() if host in ("*", "0.0.0.0") else host
        return Address(f"tcp://{name}:{bound}", folder.absolute() / CLIENT_FILE)

    def _judge(self) -> None:
        """Answer libzmq's questions about keys (ZAP, RFC 27)."""
        if self._zap is None:
            return
        # What is left over is answered a tick later: a flood of knocks keeps nobody else waiting.
        for _ in range(_AT_ONCE):
            try:
                asked = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            good = len(asked) == _ZAP_FRAMES and asked[2] == _DOMAIN and asked[5:] == [b"CURVE", self._known]
            if not good:
                self.denied += 1
                if not self.denied & (self.denied - 1):  # 1, 2, 4, ...: nobody outside fills the log
                    _LOG.warning("a client with another key was turned away (%d so far)", self.denied)
            answer = [b"200", b"", b"client"] if good else [b"400", b"another key", b""]
            self._zap.send_multipart([b"1.0", asked[1] if len(asked) > 1 else b"", *answer, b""])
