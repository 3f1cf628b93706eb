"""Adapters that the replicas run beside their weights: which version new requests get, and which old ones are in use.

A version of an adapter is never replaced in an engine. It is loaded beside the one before under a name, a number and a
folder of its own, since engines tell cache entries apart by these and not by content; the one before leaves when the
last request that runs on it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from pitstop.engine.errors import (
    InvalidRequest,
    NotServing,
    PitstopError,
    StaleVersion,
    UnsupportedPolicy,
    hint,
    names,
    near,
)
from pitstop.engine.flight import Flight
from pitstop.engine.job import bounded
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import AdapterHost
from pitstop.engine.replica import Replica
from pitstop.engine.request import Adapter

log = logging.getLogger("pitstop.engine")

_AWAY = frozenset({Phase.STARTING, Phase.DEAD, Phase.STOPPED, Phase.SLEEPING})

Write = Callable[[str], Coroutine[Any, Any, str]]


class Adapters:
    """The adapters of a fleet.

    Replicas that are away when one is loaded, or that are started anew, load it at the first request that names it.
    """

    def __init__(self, replicas: Sequence[Replica], discard: Callable[[Adapter], None] = lambda _: None) -> None:
        self.discard = discard
        self._replicas = replicas
        self._current: dict[str, Adapter] = {}
        self._retired: set[Adapter] = set()
        self._using: weakref.WeakSet[Flight] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def versions(self) -> Mapping[str, int]:
        """The version of every adapter that new requests get."""
        return {name: adapter.weight_version for name, adapter in self._current.items()}

    def current(self, name: str) -> Adapter:
        """Return what a new request gets.

        Raises:
            InvalidRequest: there is no such adapter.
        """
        try:
            return self._current[name]
        except KeyError:
            there = names(list(self._current)) or "none: refit_adapter brings one"
            close = hint({name: near(name, list(self._current))})
            raise InvalidRequest(f"there is no adapter named {name!r}, but {there}.{close}") from None

    def salted(self, flight: Flight, salt: str) -> str:
        """Give a flight the newest version of its adapter; return the salt of its cache entries."""
        if flight.adapter_name is None:
            return salt
        # What was dropped while a request was out of its engine for a swap is still there, since it holds on to it.
        kept = self._current.get(flight.adapter_name) or flight.adapter
        adapter = flight.adapter = kept or self.current(flight.adapter_name)
        self._using.add(flight)
        return f"{salt}.a{adapter.number}"

    def left(self, flight: Flight) -> None:
        """A flight has ended."""
        self._using.discard(flight)
        self._sweep()

    async def bring(self, name: str, weight_version: int, write: Write, seconds: float) -> Adapter:
        """Load a version of an adapter into every replica, within `seconds` each; new requests get it from then on.

        `write` puts it into a folder named as it is told, and returns the path. What fails changes nothing.

        Raises:
            StaleVersion: the version is not above the one that is there.
            UnsupportedPolicy: a replica's engine runs no adapters.
            NotServing: no replica is there to load it.
            PitstopError: a replica could not load it.
        """
        async with self._changing:
            before = self._current.get(name)
            if before is not None and weight_version <= before.weight_version:
                raise StaleVersion(
                    f"version {weight_version} of adapter {name} is not above {before.weight_version}",
                    weight_version=weight_version,
                )
            hosts = self._hosts()
            number = next(self._numbers)
            adapter = Adapter(name, weight_version, number, await write(f"adapter-{number}"))
            try:
                await self._load(adapter, hosts, seconds)
            except BaseException:
                self._retire(adapter)
                raise
            self._current[name] = adapter
            if before is not None:
                self._retire(before)
            return adapter

    async def drop(self, name: str) -> None:
        """Have no such adapter any more. Requests that run on it go on; it leaves with the last of them.

        Raises:
            InvalidRequest: there is no such adapter.
        """
        async with self._changing:
            adapter = self.current(name)
            del self._current[name]
            self._retire(adapter)

    def _hosts(self) -> list[tuple[str, AdapterHost]]:
        hosts: list[tuple[str, AdapterHost]] = []
        for replica in self._replicas:
            if not isinstance(replica.backend, AdapterHost):
                raise UnsupportedPolicy(f"the engine of {replica.name} runs no adapters")
            if replica.phase not in _AWAY:
                hosts.append((replica.name, replica.backend))
        return hosts

    async def _load(self, adapter: Adapter, hosts: Sequence[tuple[str, AdapterHost]], seconds: float) -> None:
        if not hosts:
            raise NotServing("no replica is there to load an adapter: restart, recover or wake one first")
        for name, host in hosts:
            await bounded(host.load_adapter(adapter), seconds, replica=name, phase="adapter")

    def _retire(self, adapter: Adapter) -> None:
        self._retired.add(adapter)
        self._sweep()

    def _sweep(self) -> None:
        """Have old versions leave that nobody runs on."""
        if not self._retired:
            return
        used = {flight.adapter for flight in self._using}
        for adapter in self._retired - used:
            self._retired.discard(adapter)
            task = asyncio.create_task(self._leave(adapter), name=f"pitstop-adapter-{adapter.number}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, adapter: Adapter) -> None:
        for name, host in self._hosts():
            # An engine that is gone has forgotten it; one that does not answer is found out by its watch.
            with contextlib.suppress(PitstopError):
                await bounded(host.unload_adapter(adapter), 10.0, replica=name, phase="adapter")
        try:
            await asyncio.to_thread(self.discard, adapter)
        except OSError as error:
            log.warning("%s of adapter %s could not be removed: %s", adapter.path, adapter.name, error)
