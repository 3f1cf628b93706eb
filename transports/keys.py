"""The keys of a control link on TCP: CURVE pairs in files that only their owner can read.

One pair is the engine's, the other is for every client of that run: whoever can read `client.key` is let in, and
can be sure that it talks to the engine that made it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from struct import error as StructError
from typing import Annotated, Final, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct
from zmq.utils import z85

from pitstop.engine.errors import KeyUnreadable

SERVER_FILE: Final = "server.key"
CLIENT_FILE: Final = "client.key"

_MOST_BYTES: Final = 1024
_KEY_BYTES: Final = 32

Z85 = Annotated[str, Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]


class ServerKey(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's pair."""

    public: Z85
    secret: Z85


class ClientKey(Struct, frozen=True, forbid_unknown_fields=True):
    """The clients' pair, and the engine's public half, which tells them whom they talk to."""

    server: Z85
    public: Z85
    secret: Z85


Key = TypeVar("Key", ServerKey, ClientKey)


def keys_of(folder: Path) -> tuple[ServerKey, ClientKey]:
    """Return the keys that lie in `folder`; make them if there are none.

    Raises:
        KeyUnreadable: they are there and cannot be used, or cannot be written.
    """
    paths = folder / SERVER_FILE, folder / CLIENT_FILE
    if not any(path.exists() for path in paths):
        server = ServerKey(*(half.decode() for half in zmq.curve_keypair()))
        client = ClientKey(server.public, *(half.decode() for half in zmq.curve_keypair()))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path, key in zip(paths, (server, client), strict=True):
                _write(path, msgspec.json.encode(key))
        except OSError as error:
            raise KeyUnreadable(f"keys cannot be written to {folder}: {error.strerror}", key=str(folder)) from None
    server, client = _read(paths[0], ServerKey), client_key(paths[1])
    if client.server != server.public:
        raise KeyUnreadable(f"{paths[1]} is not the client's key of {paths[0]}: remove both", key=str(paths[1]))
    return server, client


def client_key(path: Path) -> ClientKey:
    """Read a client's key.

    Raises:
        KeyUnreadable: it is absent, not private, or not a key.
    """
    return _read(path, ClientKey)


def decoded(content: bytes, kind: type[Key], name: str) -> Key:
    """Return the key that a file holds.

    Raises:
        KeyUnreadable: it holds none.
    """
    with contextlib.suppress(msgspec.MsgspecError, ValueError, StructError, RecursionError):
        key = msgspec.json.decode(content, type=kind)
        if all(len(z85.decode(half)) == _KEY_BYTES for half in msgspec.structs.astuple(key)):
            return key
    raise KeyUnreadable(f"{name} is not a key of an engine's control link", key=name)


def _read(path: Path, kind: type[Key]) -> Key:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise KeyUnreadable(f"{path} can be read by others: chmod 600 it, or have it made anew", key=str(path))
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise KeyUnreadable(f"the key {path} cannot be read: {error.strerror}", key=str(path)) from None
    return decoded(content, kind, str(path))


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
