"""Bytes to messages and back. Whatever comes in, what goes out is a message or a `ProtocolViolation`."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable
from sys import byteorder
from typing import Final, TypeVar

import msgspec

from pitstop.engine.errors import ErrorRecord, PitstopError, ProtocolViolation, from_record
from pitstop.transports.messages import MOST_BYTES, Fault, FromClient, FromEngine, RefitId

Message = TypeVar("Message")


class _Offering(msgspec.Struct, tag="Propose"):
    refit_id: RefitId


class _Joining(msgspec.Struct, tag="Join"):
    refit_id: RefitId


_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_CLIENT: Final[msgspec.msgpack.Decoder[FromClient]] = msgspec.msgpack.Decoder(FromClient)
_FROM_ENGINE: Final[msgspec.msgpack.Decoder[FromEngine]] = msgspec.msgpack.Decoder(FromEngine)
_ABOUT: Final = msgspec.msgpack.Decoder(_Offering | _Joining)
_UNDECODABLE: Final = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError)
_LEAST, _LARGEST = -(1 << 63), (1 << 64) - 1
_MESSAGE, _TRACEBACK, _FIELD = 16384, 32768, 4096


def encode(message: FromClient | FromEngine) -> bytes:
    """Return a message as one frame.

    Raises:
        ProtocolViolation: it is larger than a message may be, or holds a number that does not fit.
    """
    try:
        frame = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolViolation(f"{type(message).__name__} cannot be encoded: {error}") from None
    if len(frame) > MOST_BYTES:
        raise ProtocolViolation(f"{type(message).__name__} has {len(frame)} bytes, above {MOST_BYTES}")
    return frame


def from_client(*frames: bytes) -> FromClient:
    """Decode what a client sent.

    Raises:
        ProtocolViolation: it is not a message of a client; its field `refit_id` says of which refit, if that is plain.
    """
    if len(frames) != 1:
        raise ProtocolViolation(f"{len(frames)} frames in a message")
    try:
        return _decode(_FROM_CLIENT, frames[0])
    except ProtocolViolation as error:
        with contextlib.suppress(ProtocolViolation):
            error.fields["refit_id"] = _decode(_ABOUT, frames[0]).refit_id
        raise


def from_engine(frame: bytes) -> FromEngine:
    """Decode what the engine sent.

    Raises:
        ProtocolViolation: it is not a message of an engine.
    """
    return _decode(_FROM_ENGINE, frame)


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    if len(frame) > MOST_BYTES:
        raise ProtocolViolation(f"a message of {len(frame)} bytes, above {MOST_BYTES}")
    try:
        return decoder.decode(frame)
    except _UNDECODABLE as error:
        raise ProtocolViolation(f"not a message of this protocol: {str(error)[:200]}") from None


def fault(error: BaseException) -> Fault:
    """Return an error as what travels, cut to what a message may hold."""
    if isinstance(error, PitstopError):
        record = error.record()
    else:
        record = ErrorRecord("remote_error", f"{type(error).__name__}: {error}", {"kind": type(error).__name__})
    fields = {_utf8(k[:256]): _plain(v) for k, v in list(record.fields.items())[:64]}
    return Fault(record.slug, _utf8(record.message[:_MESSAGE]), fields, _utf8(record.traceback[-_TRACEBACK:]))


def _plain(value: str | int | float | None) -> str | int | float | None:
    if isinstance(value, str):
        return _utf8(value[:_FIELD])
    return str(value) if isinstance(value, int) and not _LEAST <= value <= _LARGEST else value


def _utf8(text: str) -> str:
    # A file's name may be no text at all, and an error that names it has to travel all the same.
    return text.encode(errors="replace").decode()


def raised(said: Fault) -> PitstopError:
    """Rebuild the error that a peer sent."""
    return from_record(ErrorRecord(said.slug, said.message, dict(said.fields), said.traceback))


def words(numbers: Iterable[int]) -> bytes:
    """Pack unsigned 64-bit integers, little-endian."""
    packed = array("Q", numbers)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def numbers(packed: bytes) -> tuple[int, ...]:
    """Unpack unsigned 64-bit integers.

    Raises:
        ProtocolViolation: the length is not a multiple of eight.
    """
    if len(packed) % 8:
        raise ProtocolViolation(f"{len(packed)} bytes are no list of 64-bit integers")
    unpacked = array("Q", packed)
    if byteorder == "big":
        unpacked.byteswap()
    return tuple(unpacked)
