"""What a client may say when: the engine's view of one peer. Pure; the reader of the link asks it first.

trainer    per refit   OFFERED --Accept--> SENDING (Lend, Filled) --Sent or Faulted--> DONE --Settled--> forgotten
receiver               WELCOME --attached--> ATTACHED (Drained) --landed or failed--> OVER --LetGo--> GONE: forgotten
                       a failure that holds nothing is GONE at once
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, Literal

from pitstop.engine.errors import ProtocolViolation
from pitstop.transports.messages import (
    PROTOCOL,
    Beat,
    Bye,
    Drained,
    Faulted,
    Filled,
    FromClient,
    Hello,
    Join,
    Lend,
    LetGo,
    Propose,
    Report,
    Sent,
)

MOST_OPEN: Final = 64
"""Most refits of one trainer that have not been settled."""

_REMEMBERED: Final = 256


class Stage(Enum):
    """How far one refit of a trainer is."""

    OFFERED = "offered"
    SENDING = "sending"
    DONE = "done"


class Step(Enum):
    """How far a receiver is."""

    WELCOME = "welcome"
    ATTACHED = "attached"
    OVER = "over"
    GONE = "gone"


class Session:
    """One client from its `Hello` on."""

    def __init__(self, role: Literal["trainer", "receiver"], refit_id: str = "", rank: int = 0) -> None:
        self.role: Final = role
        self.rank: Final = rank  #: of a trainer; only rank 0 sends
        self.refit_id: Final = refit_id  #: a receiver's only one
        self.stages: dict[str, Stage] = {}
        self.step = Step.WELCOME
        self._settled: deque[str] = deque(maxlen=_REMEMBERED)

    def heard(self, message: FromClient) -> bool:
        """Book what the client said; return False for what crossed with the end of its refit and no longer counts.

        Raises:
            ProtocolViolation: the client may not say this now. Nothing was booked.
        """
        if isinstance(message, Beat | Bye):
            return True
        if isinstance(message, Hello):
            raise ProtocolViolation(f"a second Hello of a {self.role}")
        if isinstance(message, Report | LetGo | Drained):
            return self._receiver(message)
        if self.role == "trainer" and isinstance(message, Join) != (self.rank > 0):
            raise ProtocolViolation(f"{type(message).__name__} from rank {self.rank} of a trainer")
        if isinstance(message, Join):
            if self.role != "trainer":
                raise ProtocolViolation(f"Join from a {self.role}")
            return True
        return self._trainer(message)

    def accepted(self, refit_id: str) -> None:
        """`Accept` was sent for a refit."""
        self.stages[refit_id] = Stage.SENDING

    def settled(self, refit_id: str) -> None:
        """`Settled` was sent for a refit: it is over for this peer."""
        if self.stages.pop(refit_id, None) is not None:
            self._settled.append(refit_id)

    def _trainer(self, message: Propose | Lend | Filled | Sent | Faulted) -> bool:
        if self.role != "trainer":
            raise ProtocolViolation(f"{type(message).__name__} from a {self.role}")
        stage = self.stages.get(message.refit_id)
        if isinstance(message, Propose):
            if stage is not None or message.refit_id in self._settled:
                raise ProtocolViolation(f"refit {message.refit_id} was offered before")
            if len(self.stages) >= MOST_OPEN:
                raise ProtocolViolation(f"more than {MOST_OPEN} refits offered and not settled")
            self.stages[message.refit_id] = Stage.OFFERED
            return True
        if stage is None and message.refit_id in self._settled:
            return False
        if stage is None:
            raise ProtocolViolation(f"{type(message).__name__} for {message.refit_id}, which was not offered")
        if stage is Stage.DONE or (not isinstance(message, Faulted) and stage is not Stage.SENDING):
            raise ProtocolViolation(f"{type(message).__name__} for {message.refit_id}, which is {stage.value}")
        if isinstance(message, Sent | Faulted):
            self.stages[message.refit_id] = Stage.DONE
        return True

    def _receiver(self, message: Report | LetGo | Drained) -> bool:
        if self.role != "receiver":
            raise ProtocolViolation(f"{type(message).__name__} from a {self.role}")
        if message.refit_id != self.refit_id:
            raise ProtocolViolation(f"{type(message).__name__} for {message.refit_id}, not {self.refit_id}")
        if isinstance(message, Drained):
            if self.step is not Step.ATTACHED:
                raise ProtocolViolation(f"Drained from a receiver that is {self.step.value}")
            return True
        if isinstance(message, LetGo):
            if self.step is Step.ATTACHED:
                raise ProtocolViolation("LetGo from a receiver that has not reported how it ended")
            self.step = Step.GONE
            return True
        allowed = {
            "attached": self.step is Step.WELCOME,
            "landed": self.step is Step.ATTACHED,
            "failed": self.step in (Step.WELCOME, Step.ATTACHED),
        }
        if not allowed[message.kind]:
            raise ProtocolViolation(f"a receiver that is {self.step.value} reports {message.kind}")
        if (message.kind == "failed") != (message.error is not None):
            raise ProtocolViolation(f"a report of {message.kind} {'with' if message.error else 'without'} an error")
        ended = Step.GONE if message.kind == "failed" and not message.holds else Step.OVER
        self.step = Step.ATTACHED if message.kind == "attached" else ended
        return True


def greeted(message: FromClient) -> Hello:
    """Return the `Hello` that a new client opens with.

    Raises:
        ProtocolViolation: it says something else first, or speaks another version of the protocol.
    """
    if not isinstance(message, Hello):
        raise ProtocolViolation(f"{type(message).__name__} from a client that has not said Hello")
    if message.rank >= message.world_size:
        raise ProtocolViolation(f"rank {message.rank} of {message.world_size}", peer=message.role)
    if message.protocol != PROTOCOL:
        raise ProtocolViolation(f"protocol {message.protocol}, but this engine speaks {PROTOCOL}", peer=message.role)
    return message
