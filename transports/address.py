"""Where an engine's control link is: `ipc://<path>`, or `tcp://<host>:<port>?key=<path of the client's key>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from pitstop.engine.errors import LocalError

_IPC: Final = "ipc://"
_LOOPBACK: Final = "127.0.0.1"
_TCP: Final = re.compile(r"tcp://([A-Za-z0-9.-]*|\*):([0-9]{1,5})(?:\?key=([A-Za-z0-9%._~/-]+))?")
_HIGHEST: Final = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """`endpoint` is what a socket is connected to; `key` is the file that opens it, if that is a TCP one."""

    endpoint: str
    key: Path | None = None

    def __str__(self) -> str:
        return self.endpoint if self.key is None else f"{self.endpoint}?key={quote(str(self.key))}"

    @property
    def path(self) -> Path | None:
        """The socket's file, if it has one."""
        return Path(self.endpoint.removeprefix(_IPC)) if self.endpoint.startswith(_IPC) else None


def parsed(address: str) -> Address:
    """Read an address.

    Raises:
        LocalError: it is none.
    """
    if address.startswith(_IPC) and len(address) > len(_IPC):
        return Address(address)
    found = _TCP.fullmatch(address)
    if found is None or int(found[2]) > _HIGHEST:
        raise _wrong(address, f"{_IPC}<path> or tcp://<host>:<port>?key=<path of the run's client.key>")
    return Address(f"tcp://{found[1] or _LOOPBACK}:{found[2]}", None if found[3] is None else Path(unquote(found[3])))


def listening(address: str) -> str:
    """Read what a link may listen on; without a host that is the loopback.

    Raises:
        LocalError: it is no `tcp://<host>:<port>`.
    """
    found = _TCP.fullmatch(address)
    if found is None or found[3] is not None or int(found[2]) > _HIGHEST:
        raise _wrong(address, "tcp://<host>:<port>, port 0 for any")
    return parsed(address).endpoint


def _wrong(address: str, what: str) -> LocalError:
    return LocalError(f"{address!r} is not an address: {what}", address=address)
