"""An independent checker of what an engine did, from its event log alone: plain data in, offences out.

It knows nothing of the engine but the words of the log. `truth(version, prompt, index)` is the token that weights of
that version make there, and None where the checker cannot know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pitstop.engine.ports import Scalar, Transition, Work

ENDS = frozenset({"stop", "length", "abort", "error"})

Truth = Callable[[int, Sequence[int], int], int | None]


class Checker:
    """Implements `ports.Observer`, and is told of every stream's chunks. Memory does not grow with the run."""

    def __init__(self, truth: Truth, versions: int) -> None:
        self.truth = truth
        self.tokens = self.events = 0
        self.offences: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._proven: dict[str, int | None] = {}
        self._phases: dict[str, str] = {}
        self._lives: dict[str, int] = {}
        self._ever = bytearray(versions + 1)
        self._open: set[str] = set()

    def offence(self, what: str, example: str = "") -> None:
        self.offences[what] += 1
        self.examples.setdefault(what, example)

    def finish(self) -> None:
        """Nothing may be under way any more."""
        for key in self._open:
            self.offence("never ended", key)

    # -- streams ---------------------------------------------------------------------------------------

    def stream(self, prompt: Sequence[int], chunks: Sequence[tuple[int, int, Sequence[int]]], end: str) -> None:
        """One stream to its end: (weight version, start, tokens) of each chunk."""
        self.ends[end] += 1
        at, last = 0, -1
        for version, start, tokens in chunks:
            if start != at:
                self.offence("token lost or doubled", f"{start} after {at}")
            if version < last:
                self.offence("version went back", f"{last} to {version}")
            if not self._ever[version]:
                self.offence("version that nobody had proven", str(version))
            at, last = start, version
            for token in tokens:
                wanted = self.truth(version, prompt, at)
                if wanted is not None and token != wanted:
                    self.offence("torn or mislabelled token", f"{token} at {at}, not {wanted} of version {version}")
                at += 1
        self.tokens += at

    # -- the log ---------------------------------------------------------------------------------------

    def transition(self, change: Transition) -> None:
        self.events += 1
        name, event, after = change.replica, change.event, change.after.value
        before = self._phases.get(name)
        if before is not None and before != change.before.value:
            self.offence("phases with a gap", f"{name} went from {before}, says {change.before.value}")
        self._phases[name] = after
        if change.incarnation < self._lives.get(name, 0):
            self.offence("an earlier life spoke", name)
        self._lives[name] = change.incarnation
        if event in ("BootedWith", "Finalized"):
            self._proven[name] = change.weight_version
            self._ever[change.weight_version or 0] = 1
        elif event in ("BootedEmpty", "RestartAsked", "Died", "FailedTorn", "DriftFound", "WokenEmpty"):
            self._proven[name] = None
        if after == "serving" and self._proven.get(name) is None:
            self.offence("served unproven weights", f"{name} after {event}")
        self.counts[f"{after} after {event}"] += 1

    def opened(self, work: Work) -> Mapping[str, str]:
        self.events += 1
        if work.key in self._open:
            self.offence("begun twice", work.key)
        self._open.add(work.key)
        return {}

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        self.events += 1
        if key not in self._open:
            self.offence("ended twice or never begun", key)
        self._open.discard(key)
        if key.startswith("generate:"):
            reason: Any = (detail or {}).get("finish_reason")
            if reason not in ENDS or (reason == "error") != (error is not None):
                self.offence("ended without a known reason", f"{reason} with {error}")

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        self.counts[f"{name} {' '.join(str(v) for v in (detail or {}).values())}".strip()] += 1
        if name == "rl.staleness":
            if value < 0:
                self.offence("negative staleness", str(value))
            self.counts = Counter({k: n for k, n in self.counts.items() if not k.startswith("rl.staleness")})
