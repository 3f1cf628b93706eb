"""One replica's part in one refit, as the refit sees it: staging, what its ranks have reported, its job, its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from pitstop.engine.errors import EngineClosed, PitstopError, ReplicaDied
from pitstop.engine.job import Incoming, Job, bounded
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Observer, Work
from pitstop.engine.refit import ReplicaReport
from pitstop.engine.replica import Replica
from pitstop.engine.staging import Staging, StagingBegan, StagingDropped, StagingEnded, advance
from pitstop.engine.worker_ports import Progress, Ticket, WorkerLayout, WorkerOp


class Part:
    """`report` is None while the part is open."""

    def __init__(self, replica: Replica, refit_id: str, weight_version: int, observer: Observer) -> None:
        self.replica = replica
        self.job: Job | None = None
        self.report: ReplicaReport | None = None
        self.seconds: dict[str, float] = {}
        self._refit_id = refit_id
        self._version = weight_version
        self._observer = observer
        self._staging = Staging()
        self._began = 0.0
        self._attached: set[int] = set()
        self._landed: set[int] = set()

    @property
    def incoming(self) -> Incoming | None:
        """What it receives in place, if it does."""
        return self.job.incoming if self.job is not None else None

    @property
    def attached(self) -> bool:
        """Whether every rank is ready to receive."""
        return len(self._attached) == len(self.replica.layout)

    @property
    def landed(self) -> bool:
        """Whether every rank has the whole version."""
        return len(self._landed) == len(self.replica.layout)

    @property
    def waits(self) -> bool:
        """Whether it still needs the trainer."""
        return self.report is None and not self.landed

    @property
    def suspended(self) -> bool:
        """Whether its replica is ready to receive in place."""
        return self.job is not None and self.replica.job is self.job and self.replica.phase is Phase.RECEIVING

    def mine(self, tickets: Sequence[Ticket]) -> tuple[Ticket, ...]:
        """Choose the tickets of the replica's present life."""
        name, life = self.replica.name, self.replica.incarnation
        return tuple(ticket for ticket in tickets if (ticket.replica, ticket.incarnation) == (name, life))

    async def spare(self, limit: float) -> list[WorkerLayout]:
        """Return its ranks with the memory that their GPUs have to spare now: others may have taken some since boot."""
        name = self.replica.name
        asking = self.replica.call_workers(WorkerOp("describe"))
        replies = await bounded(asking, limit, replica=name, phase="plan")
        now = {reply.rank: reply.layout.spare_nbytes for reply in replies if reply.layout is not None}
        return [replace(rank, spare_nbytes=now.get(rank.rank, 0)) for rank in self.replica.layout]

    def heard(self, progress: Progress) -> None:
        """Book what a rank reports, and let the replica know."""
        (self._attached if progress.kind == "attached" else self._landed).add(progress.rank)
        if self.incoming is not None and self.attached:
            self.incoming.attached.reached()
        if self.incoming is not None and self.landed:
            self.incoming.landed.reached()

    def stage(self) -> None:
        """Its workers begin to receive into spare memory."""
        self._staging = advance(self._staging, StagingBegan(self._version))
        self._began = time.monotonic()
        detail = {"replica": self.replica.name}
        self._observer.opened(Work("stage", self._stage_key, time.time_ns(), f"refit:{self._refit_id}", detail=detail))

    def staged(self, error: PitstopError | None = None) -> None:
        """Its workers have the version, or never will. Nothing if they have not begun, or have ended."""
        if not self._began or "stage" in self.seconds:
            return
        if error is None:
            self._staging = advance(self._staging, StagingEnded(self._version))
        self.seconds["stage"] = time.monotonic() - self._began
        self._observer.closed(self._stage_key, time.time_ns(), None if error is None else error.slug)

    def gone(self) -> PitstopError:
        """Return what its replica's death, or the end of the engine, means to it."""
        name = self.replica.name
        if self.replica.phase is Phase.STOPPED:
            return EngineClosed("the engine was closed while the refit ran")
        return ReplicaDied(f"{name} died during the refit", replica=name)

    def end(self, report: ReplicaReport) -> ReplicaReport:
        """It is over. Return the report, whose error names this replica: what fails a trainer fails many parts."""
        error = report.error
        if error is not None and "replica" not in error.fields:
            report = replace(report, error=error.about(replica=report.replica))
        self.report = report
        if self._staging.weight_version is not None:
            self._staging = advance(self._staging, StagingDropped(self._version))
        return report

    @property
    def _stage_key(self) -> str:
        return f"stage:{self._refit_id}:{self.replica.name}"
