"""What the fleet is doing now: an observer that keeps one row a replica, for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Scalar, Transition, Work
from pitstop.telemetry.observer import REFITTING, failure

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS: Final = {
    Phase.SERVING: "green",
    Phase.QUARANTINED: "red",
    Phase.DEAD: "red",
    Phase.STOPPED: "dim",
    Phase.IDLE: "dim",
    Phase.SLEEPING: "dim",
}


@dataclass(slots=True)
class Row:
    """One replica. `since` is when it came into its phase, `seconds` what its last refit spent in each phase."""

    replica: str
    incarnation: int
    phase: Phase
    since: int
    weight_version: int | None = None
    live: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def age(self, now: int) -> float:
        """Seconds in the present phase."""
        return max(0, now - self.since) / 1e9


class Live:
    """Keeps rows. `rows`, `active` (requests in flight), `finished` (by finish reason) and `refits` (by outcome)."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.finished: Counter[str] = Counter()
        self.refits: Counter[str] = Counter()
        self._requests: set[str] = set()

    @property
    def active(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._requests)

    def transition(self, change: Transition) -> None:
        """Bring the replica's row up to date."""
        row = self.rows.get(change.replica)
        if row is None:
            row = Row(change.replica, change.incarnation, change.before, change.at)
            self.rows[change.replica] = row
        elif change.incarnation < row.incarnation:
            return
        if change.after in REFITTING and change.before not in REFITTING:
            row.seconds, row.error = {}, None
        if change.before in REFITTING and row.phase is change.before:
            row.seconds[REFITTING[change.before]] = row.age(change.at)
        row.error = failure(change) or row.error
        if change.event in ("BootedWith", "Finalized"):
            row.weight_version, row.error = change.weight_version, None
        elif change.event in ("BootedEmpty", "FailedTorn", "DriftFound", "WokenEmpty", "Died", "StopAsked"):
            row.weight_version = None
        live = change.detail.get("live")
        if isinstance(live, int):
            row.live = live
        row.incarnation, row.phase, row.since = change.incarnation, change.after, change.at

    def opened(self, work: Work) -> Mapping[str, str]:
        """Count a request in."""
        if work.kind == "generate":
            self._requests.add(work.key)
        return work.headers

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """Count a request or a refit out."""
        detail = detail or {}
        if key in self._requests:
            self._requests.discard(key)
            self.finished[str(detail.get("finish_reason", "error" if error else "stop"))] += 1
        elif key.startswith("refit:"):
            self.refits[str(detail.get("outcome", "failed" if error else "committed"))] += 1

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        """Ignore it."""

    def render(self, now: int | None = None) -> Table:
        """Return a table for `rich`."""
        from rich.table import Table
        from rich.text import Text

        now = time.time_ns() if now is None else now
        table = Table(caption=self._caption())
        for heading in ("replica", "phase", "version", "for", "live", "last refit"):
            table.add_column(heading, justify="right" if heading in ("version", "for", "live") else "left")
        for name in sorted(self.rows):
            row = self.rows[name]
            seconds = "  ".join(f"{phase} {spent:.3f}" for phase, spent in row.seconds.items())
            table.add_row(
                f"{row.replica}.{row.incarnation}",
                Text(row.phase.value, style=_COLOURS.get(row.phase, "yellow")),
                "-" if row.weight_version is None else str(row.weight_version),
                f"{row.age(now):.1f} s",
                str(row.live),
                Text(f"{seconds}  {row.error}".strip(), style="red") if row.error else Text(seconds),
            )
        return table

    def _caption(self) -> str:
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(self.finished.items()))
        refits = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.refits.items()))
        return f"requests: {self.active} active{', ' + ended if ended else ''}; refits: {refits or 'none'}"
