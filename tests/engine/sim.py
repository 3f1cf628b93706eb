"""Builders for fleets of simulated engines."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from pitstop.engine.fleet import Fleet
from pitstop.engine.handle import RefitHandle
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Observer, Scalar, Transition, Work
from pitstop.engine.refit import RefitOptions
from pitstop.engine.simulated import Script, SimulatedBackend, SimulatedSending, SimulatedTransport, token_for
from pitstop.engine.worker_ports import Offer, TensorSpec


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


class SimFleet(Fleet):
    """A fleet with its simulated parts at hand."""

    def __init__(self, backends: Sequence[SimulatedBackend], observer: Observer | None = None) -> None:
        self.sims = backends
        self.transport = SimulatedTransport()
        self.log = Log()
        for backend in backends:
            backend.transport = self.transport
        super().__init__(backends, self.transport, observer or self.log)

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


def fleet(n: int = 1, **options: Any) -> SimFleet:
    return SimFleet([SimulatedBackend(**options) for _ in range(n)])


def expected(prompt: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> list[int]:
    return [token_for(version, prompt, i) for version, start, end in spans for i in range(start, end)]
