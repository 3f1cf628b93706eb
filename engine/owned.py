"""What the owner of a fleet does with its replicas beside refits and requests: the public side of `Upkeep`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from pitstop.engine.counters import Counters
from pitstop.engine.drift import VerifyReport
from pitstop.engine.upkeep import Upkeep


class Owned(ABC):
    """The part of `Fleet` that its owner calls now and then."""

    _upkeep: Upkeep

    @abstractmethod
    def _must_be_open(self) -> None:
        """Raise `EngineClosed` outside `async with`."""

    async def sleep(self, level: int = 1, *, policy: Literal["recompute", "wait", "abort"] = "recompute") -> None:
        """Give memory back on every serving or idle replica.

        Level 1 keeps the weights in host memory, level 2 discards them, after which only a full refit serves
        again. The KV cache is dropped by both, so requests in flight cannot `keep` theirs. While any replica
        sleeps nothing is recovered automatically: an engine that boots would take the memory that was given back.

        Raises:
            UnsupportedPolicy: `level` is not 1 or 2, or `policy` is "keep".
        """
        self._must_be_open()
        await self._upkeep.sleep(level, policy)

    async def wake_up(self) -> None:
        """Wake every sleeping replica. After level 2 it serves nothing until a refit."""
        self._must_be_open()
        await self._upkeep.wake_up()

    async def fingerprints(self) -> dict[str, dict[str, str]]:
        """Return, for each serving replica, a 64-bit number of each live tensor, as `rank:name`.

        It tells whether two replicas of one configuration hold the same weights, or one replica what it held
        before. It is about the engine's own layout, and blind to what a backend packs away (linear weights on the
        CPU). They are read beside the engine's steps.

        Raises:
            ReadingCutShort: a refit or a sleep came while they were read.
        """
        self._must_be_open()
        return await self._upkeep.fingerprints()

    async def verify(self, *, raise_on_drift: bool = True) -> VerifyReport:
        """Compare the live weights of every serving replica with what they were at their commit.

        They were read once then, and are read again now, beside the engine's steps. What has drifted is taken out of
        service at once: its replica is `QUARANTINED`, its requests end with the error and the tokens they have, and
        `recover()` or a full refit brings it back. The report says which tensors that was, how much of each model was
        compared (not what a backend packs away: linear weights on the CPU), and of which replicas nothing is known:
        those that do not serve, or whose weights a refit did not let be read after their commit.

        Args:
            raise_on_drift: raise for the first replica that has drifted, instead of returning the report.

        Raises:
            WeightsDrifted: names replica, rank, tensors and version.
        """
        self._must_be_open()
        return await self._upkeep.prints.verify(raise_on_drift=raise_on_drift)

    async def start_profile(self) -> None:
        """Have the profiler of every serving replica record; the backend's own, as its arguments say.

        Raises:
            UnsupportedPolicy: the engines were launched without one.
        """
        self._must_be_open()
        await self._upkeep.profile(begins=True)

    async def stop_profile(self) -> None:
        """Have it write what it has recorded."""
        self._must_be_open()
        await self._upkeep.profile(begins=False)

    async def counters(self) -> dict[str, Counters]:
        """Return what each living replica has counted. Empty without vLLM's statistics (`disable_log_stats=False`)."""
        self._must_be_open()
        return await self._upkeep.counters()

    async def load_ways(self) -> dict[str, dict[str, str]]:
        """Say, for each serving replica, how each tensor of the next version will get into the live parameters.

        "copied" is by the load plan; anything else is the reason why the engine's own loader has to do it, on the
        first rank on which it has to.
        """
        self._must_be_open()
        return await self._upkeep.load_ways()

    async def restart(self, replica: str | None = None) -> None:
        """Boot dead replicas anew, one by name or all. They have proven nothing and serve after their next refit."""
        self._must_be_open()
        await self._upkeep.restart(replica)
