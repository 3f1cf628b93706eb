"""Builders for fleets of simulated engines."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pitstop.engine.coordinator import Delivery
from pitstop.engine.fleet import Fleet
from pitstop.engine.handle import RefitHandle
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Observer, Ring, Scalar, Transition, Work
from pitstop.engine.recovery import Origin, Recovery
from pitstop.engine.refit import RefitOptions
from pitstop.engine.simulated import Script, SimulatedBackend, SimulatedSending, SimulatedTransport, token_for
from pitstop.engine.worker_ports import Manifest, Offer, TensorSpec, Ticket, Trailer


class Log:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.works: dict[str, Work] = {}
        self.ends: list[tuple[str, str | None, dict[str, Scalar]]] = []
        self.counts: list[tuple[str, float]] = []

    def transition(self, change: Transition) -> None:
        self.transitions.append(change)

    def opened(self, work: Work) -> dict[str, str]:
        self.works[work.key] = work
        return {}

    def closed(self, key: str, at: int, error: str | None = None, detail: Any = None) -> None:
        self.ends.append((key, error, dict(detail or {})))

    def counted(self, name: str, value: float, detail: Any = None) -> None:
        self.counts.append((name, value))

    def phases(self, replica: str) -> list[str]:
        return [t.after.value for t in self.transitions if t.replica == replica]


class Checkpoint(SimulatedSending):
    """A folder whose content is that of version `holds`, whatever version it is offered as."""

    def __init__(self, offer: Offer, holds: int) -> None:
        super().__init__(offer)
        self._holds = holds

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        content = SimulatedSending(replace(self.offer, weight_version=self._holds))
        return await content.send(manifest, tickets, ring)


class SimFleet(Fleet):
    """A fleet with its simulated parts at hand. `checkpoints`: the version that each path holds."""

    def __init__(
        self,
        backends: Sequence[SimulatedBackend],
        observer: Observer | None = None,
        *,
        recovery: Recovery | None = None,
        checkpoints: Mapping[str, int] | None = None,
        origin: str | None = None,
    ) -> None:
        self.sims = backends
        self.transport = SimulatedTransport()
        self.log = Log()
        self.checkpoints = dict(checkpoints or {})
        for backend in backends:
            backend.transport = self.transport
        super().__init__(backends, self.transport, observer or self.log, recovery=recovery)
        if origin is not None:
            version = self.checkpoints[origin]
            self._keeper.origin = Origin(version, lambda: self._checkpoint(origin, version, None, RefitOptions()))
        self.origin = origin

    def _checkpoint(
        self,
        source: str | os.PathLike[str],
        version: int,
        cast: Literal["inventory"] | None,
        options: RefitOptions,
        vocabulary: Literal["trim"] | None = None,
    ) -> Delivery:
        offer = Offer(uuid.uuid4().hex, version, tuple(self.sims[0].specs))

        async def make() -> SimulatedSending:
            return Checkpoint(offer, self.checkpoints[os.fspath(source)])

        return Delivery(offer.refit_id, version, make, options.rebase, source == self.origin)

    def phase(self, n: int = 0) -> Phase:
        return self.replicas[n].phase

    def refit_to(
        self, version: int, options: RefitOptions | None = None, *, script: Script | None = None,
        tensors: Sequence[TensorSpec] | None = None,
    ) -> RefitHandle:  # fmt: skip
        offer = Offer(uuid.uuid4().hex, version, tuple(tensors or self.sims[0].specs))

        async def make() -> SimulatedSending:
            return SimulatedSending(offer, script=script)

        return self.offer(make, options or RefitOptions(), RefitHandle(offer.refit_id, version))

    def refit_from(self, path: str, version: int) -> RefitHandle:
        delivery = self._checkpoint(path, version, None, RefitOptions())
        handle = RefitHandle(delivery.refit_id, version)
        again = partial(self._checkpoint, path, version, None, RefitOptions())
        return self.offer(delivery.make, RefitOptions(), handle, again=again)


def fleet(
    n: int = 1,
    *,
    recovery: Recovery | None = None,
    checkpoints: Mapping[str, int] | None = None,
    origin: str | None = None,
    **options: Any,
) -> SimFleet:
    backends = [SimulatedBackend(**options) for _ in range(n)]
    return SimFleet(backends, recovery=recovery, checkpoints=checkpoints, origin=origin)


async def until(true: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - it may be anything
            await asyncio.sleep(0.005)


def expected(prompt: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> list[int]:
    return [token_for(version, prompt, i) for version, start, end in spans for i in range(start, end)]
