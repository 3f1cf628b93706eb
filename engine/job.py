"""One replica's part in one refit: what to do, how long it may take, and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pitstop.engine.counters import Acceptance
from pitstop.engine.errors import DeadlineExceeded, PitstopError, RemoteError
from pitstop.engine.handle import Milestone
from pitstop.engine.ledger import Place
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import RefitOptions, ReplicaReport
from pitstop.engine.worker_ports import Ticket, Ways

T = TypeVar("T")

_PHASE_NAMES = {
    Phase.SUSPENDING: "suspend",
    Phase.RECEIVING: "receive",
    Phase.FINALIZING: "finalize",
    Phase.RESUMING: "resume",
}


@dataclass(slots=True)
class Incoming:
    """What comes straight into one suspended replica. The refit says how far it is, the replica's task listens.

    `ready`: every replica of the refit is suspended, or out of it. Receiving before that would let one replica's
    draining eat into the other's limit. `attached` and `landed`: all ranks of this replica are.
    """

    tickets: tuple[Ticket, ...]
    ready: Milestone = field(default_factory=Milestone)
    attached: Milestone = field(default_factory=Milestone)
    landed: Milestone = field(default_factory=Milestone)

    def lost(self, error: PitstopError) -> None:
        """It will not come."""
        for milestone in (self.ready, self.attached, self.landed):
            milestone.reached(error)


@dataclass(slots=True)
class Job:
    """Created by the coordinator, carried by the replica from RefitOffered to the phase that ends it.

    `incoming` is None if the version lies proven in the workers' hands already.
    """

    replica: str
    refit_id: str
    weight_version: int
    options: RefitOptions
    nbytes: int
    tensors: int
    done: asyncio.Future[ReplicaReport]
    place: Place
    seconds: dict[str, float] = field(default_factory=dict)
    incoming: Incoming | None = None
    live: int = 0
    released: int = 0
    last_output: float = 0.0
    bubble: float | None = None
    error: PitstopError | None = None
    committed: bool = False
    ways: Ways | None = None
    acceptance: Acceptance | None = None
    ended_at: float = 0.0
    _entered: tuple[str, float] | None = None

    @property
    def mode(self) -> Literal["staged", "in_place"]:
        """Where the version is received."""
        return "staged" if self.incoming is None else "in_place"

    def entered(self, phase: Phase) -> None:
        """Book the time of the phase that ends here."""
        now = time.monotonic()
        if self._entered is not None:
            name, since = self._entered
            self.seconds[name] = self.seconds.get(name, 0.0) + now - since
        self._entered = (_PHASE_NAMES[phase], now) if phase in _PHASE_NAMES else None
        if self._entered is None and not self.ended_at:
            self.ended_at = now

    def conclude(self) -> None:
        """Hand the report to whoever waits. Idempotent."""
        if not self.done.done():
            report = ReplicaReport(
                self.replica, self.committed, dict(self.seconds), self.live, self.bubble, self.error, self.ways,
                self.acceptance,
            )  # fmt: skip
            self.done.set_result(report)


async def bounded(call: Coroutine[Any, Any, T], seconds: float, *, replica: str, phase: str, peer: str = "engine") -> T:
    """Run a foreign coroutine in a plain task, for at most `seconds`.

    The task is cancelled once when time is up, and then left alone: an engine call cannot be taken back, and
    anyio's repeated cancellation would kill the cleaning up inside it.

    Raises:
        DeadlineExceeded: names replica, phase and peer. RemoteError: the coroutine was cancelled, not by its caller.
    """
    task = asyncio.create_task(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_heard)
        raise DeadlineExceeded(
            f"{replica}: {phase} did not end within {seconds:g} s (waiting for {peer})",
            replica=replica, phase=phase, peer=peer, seconds=seconds,
        )  # fmt: skip
    if task.cancelled():
        # Not by us: as an error it ends what waits for it, as a cancellation it would end whoever waits.
        raise RemoteError(f"{replica}: {phase} was cancelled by {peer}", replica=replica, phase=phase, peer=peer)
    return task.result()


async def unless_lost(incoming: Incoming | None, call: Coroutine[Any, Any, None]) -> None:
    """Run `call`, and end it if what comes is lost before anybody is ready for it.

    Raises:
        PitstopError: why it was lost.
    """
    task = asyncio.create_task(call)
    lost = asyncio.create_task(incoming.ready.wait()) if incoming is not None else None
    try:
        await asyncio.wait({task} if lost is None else {task, lost}, return_when=asyncio.FIRST_COMPLETED)
        await (task if lost is None or task.done() else lost)
    finally:
        for each in (task, lost):
            if each is not None:
                each.cancel()


def _heard(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
