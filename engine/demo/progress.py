"""What a run has come to so far: filled by the loop, read by the view, written into the run folder."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pitstop.engine.demo.buffer import Rollout
from pitstop.engine.demo.messages import Refitted, Trained
from pitstop.engine.demo.witness import Witness

WINDOW = 5
"""Steps at either end whose rewards are compared."""
REFIT_FIELDS = ("outcome", "transport", "nbytes", "seconds", "phases", "bubble")


@dataclass(slots=True)
class Step:
    """One optimizer step, the rollouts it learned from, and the refit that followed it."""

    step: int
    reward: float
    loss: float
    drift: float
    clipped: float
    staleness: float
    stalest: int
    answer_tokens: float
    train_seconds: float
    at: float
    refit: Refitted | None = None


@dataclass(slots=True)
class Progress:
    """Grows as the run goes. `stage` says what is going on; `tokens` counts what the replicas have made."""

    steps: int
    stage: str = "starting"
    trained: list[Step] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    crossed: int = 0
    stale: int = 0
    sample: str = ""
    witnesses: int = 0
    broken: int = 0
    longest_pause: float = 0.0
    across: Witness | None = None
    before: float | None = None
    after: float | None = None
    begun: float = field(default_factory=time.monotonic)
    first: float | None = None
    ended: float | None = None

    def generated(self, rollout: Rollout) -> None:
        """A group of answers has come."""
        if self.first is None:
            self.first = time.monotonic()
        self.answers += len(rollout.group.answers)
        self.tokens += sum(len(answer.token_ids) for answer in rollout.group.answers)
        self.crossed += rollout.crossed

    def saw(self, witness: Witness) -> None:
        """A stream that was open through a refit has ended."""
        if witness.crossed:
            self.witnesses += 1
            self.longest_pause = max(self.longest_pause, witness.pause)
            self.across = witness

    def learned(self, message: Trained, rollouts: Sequence[Rollout]) -> None:
        """A step is done; its refit follows."""
        answers = [answer for rollout in rollouts for answer in rollout.group.answers]
        lags = [message.weight_version - 1 - rollout.weight_version for rollout in rollouts]
        self.trained.append(
            Step(
                step=message.weight_version,
                reward=statistics.fmean(answer.reward for answer in answers),
                loss=message.loss,
                drift=message.drift,
                clipped=message.clipped,
                staleness=statistics.fmean(lags),
                stalest=max(lags),
                answer_tokens=statistics.fmean(len(answer.token_ids) for answer in answers),
                train_seconds=message.seconds,
                at=time.monotonic() - self.begun,
            )
        )

    def refitted(self, message: Refitted) -> None:
        """A refit has ended."""
        for step in reversed(self.trained):
            if step.step == message.weight_version:
                step.refit = message
                return

    @property
    def refits(self) -> list[Refitted]:
        """Refits that have ended, in order."""
        return [step.refit for step in self.trained if step.refit is not None]

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return [step.reward for step in self.trained]

    @property
    def rate(self) -> float:
        """Tokens a second since the first answers."""
        if self.first is None:
            return 0.0
        return self.tokens / max(1e-3, (self.ended or time.monotonic()) - self.first)

    def gain(self) -> tuple[float, float]:
        """Return the mean reward of the first steps and of the last ones."""
        count = max(1, min(WINDOW, len(self.rewards) // 2))
        return statistics.fmean(self.rewards[:count]), statistics.fmean(self.rewards[-count:])

    def write(self, folder: Path) -> None:
        """Write `steps.jsonl` and `result.json`."""
        lines = [json.dumps(plain(step)) for step in self.trained]
        (folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))
        first, last = self.gain() if self.trained else (None, None)
        result = {
            "steps": len(self.trained),
            "reward_first": first,
            "reward_last": last,
            "accuracy_before": self.before,
            "accuracy_after": self.after,
            "tokens": self.tokens,
            "answers": self.answers,
            "answers_across_versions": self.crossed,
            "streams_across_a_refit": self.witnesses,
            "streams_broken": self.broken,
            "longest_pause_of_a_stream": self.longest_pause,
            "groups_too_stale": self.stale,
            "tokens_per_second": self.rate,
            "seconds": (self.ended or time.monotonic()) - self.begun,
        }
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def plain(step: Step) -> dict[str, object]:
    """Return a step as plain data."""
    out = {name: getattr(step, name) for name in Step.__dataclass_fields__ if name != "refit"}
    if step.refit is not None:
        out["refit"] = {name: getattr(step.refit, name) for name in REFIT_FIELDS}
    return out
