"""Which replica takes the next request: the least loaded open one, ties spread, sessions kept where they are."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from pitstop.engine.errors import NotServing
from pitstop.engine.lifecycle import Phase
from pitstop.engine.replica import Replica

_SESSIONS: Final = 65_536
_AT_ONCE: Final = 32
_COMING: Final = frozenset(
    {Phase.STARTING, Phase.SUSPENDING, Phase.RECEIVING, Phase.FINALIZING, Phase.RESUMING, Phase.SERVING}
)
_MISSING: Final = {
    Phase.IDLE: "it has no proven weights: a full refit is missing (or `recover()`)",
    Phase.QUARANTINED: "its weights are not to be trusted: a full refit is missing (or `recover()`)",
    Phase.SLEEPING: "it sleeps: wake_up() is missing",
    Phase.DEAD: "its engine died: `recover()` brings it back, or a restart and a refit",
    Phase.STOPPED: "it was stopped",
}


class Router:
    """Admission to a fleet. Waiters are served in the order they came."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        expecting: Callable[[], bool],
        verdict: Callable[[Replica], str | None] = lambda _: None,
    ) -> None:
        """`expecting`: whether a replica may come back by itself; `verdict`: why one does not."""
        self._replicas = replicas
        self._expecting = expecting
        self._verdict = verdict
        self._turn = 0
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._waiters: dict[asyncio.Future[None], None] = {}

    def changed(self) -> None:
        """A replica changed phase, a refit ended, recovery was given up: if that is news to waiters, let them look."""
        if self._waiters and (self._open() or not self._coming()):
            self._wake()

    def _wake(self) -> None:
        # A few a turn, the oldest first: each goes on to submit a request, and the loop has others to serve.
        for waiter in list(itertools.islice(self._waiters, _AT_ONCE)):
            del self._waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            asyncio.get_running_loop().call_soon(self.changed)

    def _open(self) -> list[Replica]:
        return [r for r in self._replicas if r.gate.commit is not None]

    def _coming(self) -> bool:
        return self._expecting() or any(r.phase in _COMING for r in self._replicas)

    async def admit(self, session_id: str | None, wait: Callable[[asyncio.Future[None]], None]) -> Replica:
        """Return an open replica, waiting while one is on its way. Take its lease before the next await.

        `wait` is told what is waited for; whoever sets an exception there ends the wait with it.

        Raises:
            NotServing: no replica is open and none will be without the caller's help; says which step is missing.
        """
        while True:
            if (replica := self._pick(session_id)) is not None:
                return replica
            if not self._coming():
                raise NotServing("no replica serves: " + "; ".join(self._why(r) for r in self._replicas))
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            wait(waiter)
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)

    def _why(self, replica: Replica) -> str:
        missing = self._verdict(replica) or _MISSING.get(replica.phase, "it is on its way")
        return f"{replica.name} is {replica.phase.value}: {missing}"

    def _pick(self, session_id: str | None) -> Replica | None:
        ready = self._open()
        if not ready:
            return None
        if session_id is None:
            return self._least(ready)
        home = self._sessions.get(session_id)
        replica = next((r for r in ready if r.name == home), None) or self._least(ready)
        self._sessions[session_id] = replica.name
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return replica

    def _least(self, ready: Sequence[Replica]) -> Replica:
        low = min(r.load for r in ready)
        ties = [r for r in ready if r.load == low]
        self._turn += 1
        return ties[self._turn % len(ties)]
