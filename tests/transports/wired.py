"""A whole engine whose replicas are simulated and whose link, transport and receivers are real."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from pitstop.engine import RolloutEngine
from pitstop.engine.handle import RefitHandle
from pitstop.engine.simulated import SimulatedBackend
from pitstop.engine.worker_ports import Ticket, WorkerOp, WorkerReply
from tests.transports.children import Worker
from tests.transports.weights import inventory, weights


class WiredBackend(SimulatedBackend):
    """What its receiver was given is kept in `content` when it is applied."""

    def __init__(self, versions: dict[str, int], **options: Any) -> None:
        super().__init__(**options)
        self.specs = inventory(weights(0)).tensors
        self.transport = cast(Any, self)
        self.content: dict[str, str] | None = None
        self._versions = versions
        self._workers: dict[str, Worker] = {}

    def receive(self, ticket: Ticket, _backend: SimulatedBackend) -> None:
        self._workers[ticket.refit_id] = worker = Worker()
        worker.receive(ticket)

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        worker = self._workers.get(op.refit_id)
        if worker is not None and op.verb == "apply":
            self.content = await asyncio.to_thread(worker.content)
            self.landed(op.refit_id, self._versions[op.refit_id])
        replies = await super().call_workers(op)
        if worker is not None and op.verb == "release":
            await asyncio.to_thread(self._workers.pop(op.refit_id).release)
        return replies


class Wired(RolloutEngine):
    def __init__(self, weight_version: int = 0, **options: Any) -> None:
        self.versions: dict[str, int] = {}
        self.sim = WiredBackend(self.versions, weight_version=weight_version)
        super().__init__([self.sim], **options)

    def offer(self, make: Any, options: Any, handle: RefitHandle, **more: Any) -> RefitHandle:
        self.versions[handle.refit_id] = handle.weight_version
        return super().offer(make, options, handle, **more)
