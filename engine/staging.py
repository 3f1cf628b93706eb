"""Staging: new weights waiting in spare memory while the replica serves. One small table per replica.

A failure here costs nothing: no live byte is involved. A newer version may take the place of a staged one until
the swap begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from pitstop.engine.errors import IllegalEvent


class Stage(Enum):
    """What lies in a replica's spare memory."""

    EMPTY = "empty"
    STAGING = "staging"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class StagingBegan:
    """Receivers were started for a version."""

    weight_version: int


@dataclass(frozen=True, slots=True)
class StagingEnded:
    """Every rank holds the whole version, proven."""

    weight_version: int


@dataclass(frozen=True, slots=True)
class StagingDropped:
    """The version failed, was replaced, or went into the live parameters."""

    weight_version: int


StagingEvent = StagingBegan | StagingEnded | StagingDropped


@dataclass(frozen=True, slots=True)
class Staging:
    """A stage and the version it is about (None when EMPTY)."""

    stage: Stage = Stage.EMPTY
    weight_version: int | None = None


TABLE: Final[Mapping[tuple[Stage, type[StagingEvent]], Stage]] = MappingProxyType({
    (Stage.EMPTY, StagingBegan): Stage.STAGING,
    (Stage.STAGING, StagingEnded): Stage.STAGED,
    (Stage.STAGING, StagingDropped): Stage.EMPTY,
    (Stage.STAGED, StagingDropped): Stage.EMPTY,
})  # fmt: skip


def advance(staging: Staging, event: StagingEvent) -> Staging:
    """Return the next staging state.

    Raises:
        IllegalEvent: no such row, or the event is about another version than the one in memory.
    """
    stage = TABLE.get((staging.stage, type(event)))
    other = staging.weight_version is not None and staging.weight_version != event.weight_version
    if stage is None or other:
        raise IllegalEvent(
            f"{type(event).__name__} of version {event.weight_version} cannot happen while "
            f"{staging.stage.value} {staging.weight_version}",
            phase=staging.stage.value,
            event=type(event).__name__,
        )
    return Staging(stage, None if stage is Stage.EMPTY else event.weight_version)
