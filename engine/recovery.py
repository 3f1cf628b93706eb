"""Bringing lost replicas back: booted anew where they died, then a full refit from what is still at hand.

On request or, if asked for, by itself. Two rules hold either way. What is delivered is the fleet's newest version, or
one above it that no replica has proven yet: never an older one. And a version that was committed before is taken only
with the content it had then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import anyio

from pitstop.engine.coordinator import Coordinator, Delivery
from pitstop.engine.errors import EngineClosed, NotServing, PitstopError, StaleVersion, UnsupportedPolicy
from pitstop.engine.handle import RefitHandle
from pitstop.engine.ledger import Ledger, Place
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Observer, Sending, Transport
from pitstop.engine.refit import Deadlines, Outcome, RefitOptions, RefitReport
from pitstop.engine.replica import Replica
from pitstop.engine.upkeep import Upkeep

log = logging.getLogger("pitstop.engine")

_LOST = frozenset({Phase.DEAD, Phase.QUARANTINED})
_EMPTY = frozenset({Phase.IDLE, Phase.QUARANTINED})
_ROUNDS = 3
"""How often a request to recover begins anew because a refit of somebody else's came in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How automatic recovery goes about it.

    A lost replica is tried at once, then after `backoff` seconds, twice that, and so on up to `longest`. After
    `attempts` tries it stays as it is until something else brings it back: a refit, `restart()`, `recover()`.
    Tries are forgotten once it has served for `steady` seconds. `deadlines` are those of the refits that it needs:
    a refit of the trainer's waits for them.
    """

    attempts: int = 5
    backoff: float = 1.0
    longest: float = 60.0
    steady: float = 300.0
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise UnsupportedPolicy(f"recovery with {self.attempts} attempts, below 1")
        if not 0 < self.backoff <= self.longest < 1e7 or not 0 <= self.steady < 1e7:
            raise UnsupportedPolicy(f"recovery needs 0 < backoff <= longest and 0 <= steady, not {self}")

    def pause(self, tried: int) -> float:
        """Seconds to wait before the next try."""
        return min(self.longest, self.backoff * 2.0 ** min(tried - 1, 30)) if tried else 0.0


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that replicas boot from, for as long as its files are the ones they booted from."""

    weight_version: int
    open: Callable[[], Delivery]


@dataclass(slots=True)
class _Case:
    """One replica that was lost at least once."""

    replica: Replica
    tried: int = 0
    due: float = 0.0
    lost: bool = True
    trying: bool = False
    booting: bool = False
    refitting: bool = False
    given_up: bool = False
    stuck: bool = False
    back_at: float = 0.0
    error: PitstopError | None = None


@dataclass(slots=True, eq=False)
class Keeper:
    """Recovers the replicas of one fleet: when asked (`recover`), and by itself with `options` (`run`)."""

    replicas: Sequence[Replica]
    ledger: Ledger
    coordinator: Coordinator
    transport: Transport
    observer: Observer
    upkeep: Upkeep
    told: Callable[[], None]
    options: Recovery | None = None
    origin: Origin | None = None
    _begun: bool = False
    _closed: bool = False
    _cases: dict[str, _Case] = field(default_factory=dict)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    _delivering: bool = False

    # -- on request ------------------------------------------------------------------------------------

    async def recover(self, given: Delivery | None, options: RefitOptions) -> RefitReport | None:
        """See `Fleet.recover`."""
        failures = await self.upkeep.boot_dead()
        async with self._one:
            report = await self._recover(given, options)
        if failures:
            raise failures[0]
        return report

    async def _recover(self, given: Delivery | None, options: RefitOptions) -> RefitReport | None:
        report: RefitReport | None = None
        for _ in range(_ROUNDS):
            while self.coordinator.busy and self._behind():
                await self.coordinator.moved()  # a refit that is on its way repairs what it can
            delivery = given
            if given is None:
                if not self._behind():
                    break
                delivery = self._at_hand(0)
            elif not given.rebase and self._is_newest(given.weight_version) and not self._behind():
                return None
            if delivery is None:
                raise self._nothing()
            try:
                report = await self._deliver(delivery, options)
            except StaleVersion:
                if given is not None:
                    raise
                continue  # a newer version came in between
            if given is not None or report.outcome is not Outcome.SUPERSEDED:
                break
        return report

    def _behind(self) -> list[Replica]:
        newest = self.ledger.newest
        able = [r for r in self.replicas if r.phase not in (Phase.DEAD, Phase.STOPPED, Phase.SLEEPING)]
        return [r for r in able if newest is None or r.place != newest]

    def _is_newest(self, version: int) -> bool:
        newest = self.ledger.newest
        return newest is not None and newest.weight_version == version

    def _at_hand(self, turn: int) -> Delivery | None:
        """Return something to refit from: what was sealed last, or a checkpoint that holds the newest version.

        What was sealed and never committed is the trainer's last word, but its trainer was told that it had failed:
        it counts only where nothing else serves. `turn` goes round where several are good.
        """
        newest, sealed = self.ledger.newest, self.coordinator.sealed
        found = []
        if sealed is not None and (sealed == newest or (not self._proven() and (newest is None or sealed > newest))):
            sending = self.transport.replay(sealed.weight_version)
            if sending is not None:
                rebase = newest is not None and newest != sealed and newest.later(sealed.weight_version) != sealed
                found.append(_replayed(sending, rebase=rebase))
        if self.coordinator.lasting is not None and self.coordinator.lasting[0] == newest:
            found.append(self.coordinator.lasting[1]())
        if self.origin is not None and newest == Place.first(self.origin.weight_version):
            found.append(self.origin.open())
        return found[turn % len(found)] if found else None

    def _proven(self) -> bool:
        return any(r.place is not None for r in self.replicas)

    def _nothing(self) -> NotServing:
        newest = self.ledger.newest
        version = newest.weight_version if newest is not None else None
        what = "no version was ever committed, and none" if newest is None else f"version {version}"
        return NotServing(
            f"{what} is no longer at hand: publish it again, or recover from a checkpoint "
            "(`recover(path)`; an older version needs rebase=True)",
            weight_version=version,
        )

    async def _deliver(self, delivery: Delivery, options: RefitOptions) -> RefitReport:
        handle = RefitHandle(delivery.refit_id, delivery.weight_version)
        options = replace(options, rebase=delivery.rebase)
        self.coordinator.offer(handle, delivery.make, options, same=delivery.same)
        return await handle

    # -- by itself -------------------------------------------------------------------------------------

    @property
    def hopeful(self) -> bool:
        """Whether a lost replica is going to be tried: requests may wait for it."""
        if self.options is None or not self._begun or self._closed or self._asleep():
            return False
        return any(
            r.phase in _LOST and r.name not in self._cases
            for r in self.replicas  # not looked at yet
        ) or any(c.lost and not c.given_up and not c.stuck for c in self._cases.values())

    def verdict(self, replica: Replica) -> str | None:
        """Say why a replica stays lost, if automatic recovery has an opinion."""
        case = self._cases.get(replica.name)
        if case is None or not case.lost or case.error is None or not (case.given_up or case.stuck):
            return None
        tries = f"after {case.tried} tries" if case.given_up else "for now"
        return f"recovery was given up {tries}: {case.error}"

    def begin(self) -> None:
        """Look after the replicas from now on. Called once all have booted."""
        self._begun = True
        self._woken.set()

    def close(self) -> None:
        """Begin nothing any more. Idempotent."""
        self._closed = True
        self._woken.set()

    def changed(self) -> None:
        """A replica changed phase."""
        if self.options is not None:
            self._woken.set()

    def refitted(self) -> None:
        """A refit has ended, so there may be something at hand that was not before."""
        for case in self._cases.values():
            case.stuck = False
        self.changed()

    async def run(self) -> None:
        """Recover what is lost until cancelled; without options there is nothing to do."""
        if self.options is None:
            return
        async with anyio.create_task_group() as group:
            while not self._closed:
                self._woken.clear()
                now = time.monotonic()
                if self._begun:
                    self._look(self.options, now)
                    if not self._asleep():
                        for case in self._due(frozenset({Phase.DEAD}), now):
                            if case.tried >= self.options.attempts:
                                # It died between its boot and its refit.
                                self._give_up(case, case.replica.error)
                                continue
                            case.booting = True
                            group.start_soon(self._boot, case, self.options)
                        empty = self._due(_EMPTY, now)
                        if empty and not self._delivering and not self.coordinator.busy:
                            self._delivering = True
                            group.start_soon(self._refit, empty, self.options)
                with anyio.move_on_after(self._sleep_for(now)):
                    await self._woken.wait()

    def _asleep(self) -> bool:
        # Memory was given back on purpose: an engine that boots now would take it from whoever has it.
        return any(r.phase is Phase.SLEEPING for r in self.replicas)

    def _look(self, options: Recovery, now: float) -> None:
        for replica in self.replicas:
            case = self._cases.get(replica.name)
            if replica.phase in _LOST:
                if case is None:
                    self._cases[replica.name] = _Case(replica)
                elif not case.lost:
                    case.tried = 0 if now - case.back_at >= options.steady else case.tried
                    case.lost, case.stuck, case.due = True, False, now + options.pause(case.tried)
                    if case.tried >= options.attempts:
                        self._give_up(case, replica.error)
            elif replica.phase is Phase.SERVING and case is not None and case.lost and not self._delivering:
                # Somebody else's refit has brought it back, after a boot of ours or not.
                case.tried = case.tried if case.trying else 0
                case.lost = case.trying = case.given_up = case.stuck = False
                case.back_at = now

    def _due(self, phases: frozenset[Phase], now: float) -> list[_Case]:
        return [c for c in self._cases.values() if self._waits(c) and c.replica.phase in phases and c.due <= now]

    @staticmethod
    def _waits(case: _Case) -> bool:
        # One that dies as soon as its refit has committed is lost anew, and judged as such when that refit has ended.
        return case.lost and not (case.booting or case.refitting or case.given_up or case.stuck)

    def _sleep_for(self, now: float) -> float | None:
        # What was due by `now` waits for an event: a boot, a refit, somebody else's refit, a wake.
        times = [c.due - now for c in self._cases.values() if self._waits(c) and c.due > now]
        return min(times, default=None)

    async def _boot(self, case: _Case, options: Recovery) -> None:
        case.tried, case.trying = case.tried + 1, True
        log.warning("%s: try %d of %d to recover it", case.replica.name, case.tried, options.attempts)
        try:
            await case.replica.restart()
        except EngineClosed:
            return
        except PitstopError as error:
            self._failed(case, error, options)
        finally:
            case.booting = False
            self._woken.set()

    async def _refit(self, cases: Sequence[_Case], options: Recovery) -> None:
        try:
            async with self._one:
                cases = [c for c in cases if c.replica.phase in _EMPTY]
                if cases and not self.coordinator.busy and not self._closed:
                    for case in cases:
                        case.refitting = True
                    await self._refit_now(cases, options)
        finally:
            for case in cases:
                case.refitting = False
            self._delivering = False
            self._woken.set()

    async def _refit_now(self, cases: Sequence[_Case], options: Recovery) -> None:
        delivery = self._at_hand(max(c.tried - c.trying for c in cases))
        if delivery is None:
            for case in cases:
                case.stuck, case.trying, case.error = True, False, self._nothing()
                log.error("%s waits for a refit: %s", case.replica.name, case.error)
            self.told()
            return
        for case in cases:
            case.tried, case.trying = case.tried + (not case.trying), True
        failure: PitstopError | None = None
        report: RefitReport | None = None
        try:
            report = await self._deliver(delivery, RefitOptions(deadlines=options.deadlines))
        except EngineClosed:
            return
        except PitstopError as error:
            failure = error
        parts = report.replicas if report is not None else {}
        superseded = report is not None and report.outcome is Outcome.SUPERSEDED
        now = time.monotonic()
        for case in cases:
            part = parts.get(case.replica.name)
            if part is not None and part.committed:
                case.trying = case.lost = case.given_up = False
                case.back_at = now
                log.warning("%s serves version %s again", case.replica.name, delivery.weight_version)
                self._count("recovered")
            elif isinstance(failure, StaleVersion) or (report is not None and (part is None or superseded)):
                # Somebody else's refit or sleep came first: that is no try of ours.
                case.tried, case.trying, case.due = case.tried - 1, False, now + options.backoff
            else:
                why = failure or (part.error if part is not None else None)
                self._failed(case, why or NotServing(f"{case.replica.name} was not recovered"), options)

    def _failed(self, case: _Case, error: PitstopError, options: Recovery) -> None:
        case.trying = False
        if case.tried >= options.attempts:
            self._give_up(case, error)
            return
        case.error, case.due = error, time.monotonic() + options.pause(case.tried)
        log.warning("%s was not recovered: %s", case.replica.name, error)
        self._count("failed")

    def _give_up(self, case: _Case, error: PitstopError | None) -> None:
        case.given_up, case.error = True, error or NotServing(f"{case.replica.name} was lost again")
        log.error("%s: recovery given up after %d tries: %s", case.replica.name, case.tried, case.error)
        self._count("given_up")
        self.told()

    def _count(self, how: str) -> None:
        self.observer.counted("rl.replica.recoveries", 1, {"recovery": how})


def _replayed(sending: Sending, *, rebase: bool) -> Delivery:
    async def make() -> Sending:
        return sending

    return Delivery(sending.offer.refit_id, sending.offer.weight_version, make, rebase)
