"""What the demo's two processes say to each other, over the pipe between a parent and its own child."""

from __future__ import annotations

import msgspec


class Attend(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: the engine is up; publish there."""

    address: str


class AnswerRecord(msgspec.Struct, frozen=True, tag=True):
    """One answer."""

    token_ids: list[int]
    logprobs: list[float]
    reward: float


class GroupRecord(msgspec.Struct, frozen=True, tag=True):
    """One problem and its answers."""

    prompt: list[int]
    answers: list[AnswerRecord]


class Batch(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: learn from these, then publish `weight_version`."""

    weight_version: int
    groups: list[GroupRecord]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: nothing follows."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the trainer: the model is loaded."""

    parameters: int
    seconds: float


class Trained(msgspec.Struct, frozen=True, tag=True):
    """From the trainer: one optimizer step is done, and its weights are on their way."""

    weight_version: int
    loss: float
    clipped: float
    drift: float
    norm: float
    groups: int
    tokens: int
    seconds: float


class Refitted(msgspec.Struct, frozen=True, tag=True):
    """From the trainer: every replica serves a version. Times in seconds."""

    weight_version: int
    outcome: str
    transport: str
    nbytes: int
    seconds: float
    phases: dict[str, float]
    bubble: float | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the trainer, as its last word."""

    error: str
    traceback: str


ToTrainer = Attend | Batch | Stop
FromTrainer = Ready | Trained | Refitted | Failed

_encode = msgspec.msgpack.Encoder().encode
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)


def packed(message: ToTrainer | FromTrainer) -> bytes:
    """Return a message as bytes."""
    return _encode(message)


def to_trainer(data: bytes) -> ToTrainer:
    """Read a message in the trainer."""
    return _to_trainer.decode(data)


def from_trainer(data: bytes) -> FromTrainer:
    """Read a message in the main process."""
    return _from_trainer.decode(data)
