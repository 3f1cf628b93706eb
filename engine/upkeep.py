"""What a fleet's owner does to replicas beside refits: sleep, wake, restart, look at the live weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from typing import Literal

from pitstop.engine.counters import Counters
from pitstop.engine.errors import EngineClosed, PitstopError, ReplicaDied, UnsupportedPolicy, from_record
from pitstop.engine.job import bounded
from pitstop.engine.lifecycle import Phase
from pitstop.engine.prints import Prints
from pitstop.engine.refit import Deadlines
from pitstop.engine.replica import Replica
from pitstop.engine.worker_ports import WorkerOp

_NOT_ALIVE = frozenset({Phase.STARTING, Phase.DEAD, Phase.STOPPED})
_NOT_ASLEEP = frozenset({Phase.SLEEPING, Phase.DEAD, Phase.QUARANTINED})


class Upkeep:
    """The replicas of one fleet, handled together. What fails on one does not keep it from the others."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self.prints = Prints(replicas)

    async def sleep(self, level: int, policy: Literal["recompute", "wait", "abort"]) -> None:
        """See `Fleet.sleep`."""
        if level not in (1, 2):
            raise UnsupportedPolicy(f"sleep level {level} is not 1 or 2")
        if policy not in ("recompute", "wait", "abort"):
            raise UnsupportedPolicy("a sleep drops the KV cache: use recompute, wait or abort")
        _raise_first(await _all(r.sleep(level, policy) for r in self._replicas if r.phase not in _NOT_ASLEEP))

    async def wake_up(self) -> None:
        """See `Fleet.wake_up`."""
        _raise_first(await _all(r.wake() for r in self._replicas if r.phase is Phase.SLEEPING))

    async def restart(self, replica: str | None = None) -> None:
        """See `Fleet.restart`."""
        if replica is not None and replica not in {r.name for r in self._replicas}:
            known = ", ".join(r.name for r in self._replicas)
            raise UnsupportedPolicy(f"there is no replica {replica}, only {known}")
        _raise_first(await self.boot_dead(replica))

    async def boot_dead(self, replica: str | None = None) -> list[PitstopError]:
        """Boot dead replicas anew, one by name or all; return what kept some of them from it."""
        await _all(r.caught_up() for r in self._replicas)
        dead = [r for r in self._replicas if r.phase is Phase.DEAD and replica in (None, r.name)]
        return await _all(r.restart() for r in dead)

    async def counters(self) -> dict[str, Counters]:
        """See `Fleet.counters`."""
        limit = Deadlines().control
        found: dict[str, Counters] = {}
        for replica in self._replicas:
            if replica.phase not in _NOT_ALIVE:
                # One that has just died may not be known to be dead.
                with contextlib.suppress(ReplicaDied, EngineClosed):
                    call = replica.backend.counters()
                    found[replica.name] = await bounded(call, limit, replica=replica.name, phase="count")
        return found

    async def profile(self, *, begins: bool) -> None:
        """See `Fleet.start_profile` and `stop_profile`."""
        op = WorkerOp("start_profile" if begins else "stop_profile")
        _raise_first(await _all(self._told(r, op) for r in self._replicas if r.phase is Phase.SERVING))

    @staticmethod
    async def _told(replica: Replica, op: WorkerOp) -> None:
        call = replica.backend.call_workers(op)
        for reply in await bounded(call, Deadlines().finalize, replica=replica.name, phase="profile"):
            if reply.error is not None:
                raise from_record(reply.error)

    async def load_ways(self) -> dict[str, dict[str, str]]:
        """See `Fleet.load_ways`."""
        found: dict[str, dict[str, str]] = {}
        for replica in self._replicas:
            if replica.phase is Phase.SERVING and replica.booted is not None:
                call = replica.backend.call_workers(WorkerOp("ways", tensors=replica.booted.inventory.tensors))
                ways = found[replica.name] = {}
                for reply in await bounded(call, Deadlines().control, replica=replica.name, phase="ways"):
                    if reply.error is not None:
                        raise from_record(reply.error)
                    for name, way in (reply.way_of or {}).items():
                        ways[name] = way if ways.get(name, "copied") == "copied" else ways[name]
        return found

    async def fingerprints(self) -> dict[str, dict[str, str]]:
        """See `Fleet.fingerprints`."""
        served = [(r, r.commit) for r in self._replicas if r.phase is Phase.SERVING]
        read = [(r.name, await self.prints.read(r, commit)) for r, commit in served if commit is not None]
        return {
            name: {
                f"{rank}:{tensor}": value for rank, found in reading.tensors.items() for tensor, value in found.items()
            }
            for name, reading in read
        }


async def _all(calls: Iterable[Awaitable[None]]) -> list[PitstopError]:
    """Await all calls; return the errors that are known, raise what is not."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PitstopError):
            raise result
    return [result for result in results if isinstance(result, PitstopError)]


def _raise_first(errors: Sequence[PitstopError]) -> None:
    if errors:
        raise errors[0]
