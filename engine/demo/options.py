"""The demo's command line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pitstop.engine.demo.learner import Hyper
from pitstop.engine.demo.models import SMOLLM2, TINY
from pitstop.engine.demo.task import Addition, Letters, Task

STEPS, QUICK_STEPS = 30, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run."""

    model: str = SMOLLM2
    replicas: int = 2
    steps: int = STEPS
    seed: int = 0
    max_staleness: int = 1
    groups: int = 8
    answers: int = 8
    run_dir: Path = Path("runs/demo")
    hyper: Hyper = field(default_factory=Hyper)

    @property
    def fleet(self) -> str:
        """The replicas in words."""
        return f"{self.replicas} vLLM replica{'s' if self.replicas > 1 else ''}"

    @property
    def task(self) -> Task:
        """The task that fits the model: random weights cannot add."""
        return Letters() if self.model == TINY else Addition()


def parse(argv: Sequence[str]) -> Options:
    """Read the options; exits with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="pitstop demo",
        description="Train a small language model with GRPO while real vLLM replicas stream rollouts: "
        "every optimizer step is followed by a refit, and generation goes on meanwhile.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=f"one replica and {QUICK_STEPS} steps, unless said otherwise")
    add("--model", default=SMOLLM2, metavar="NAME", help=f"{SMOLLM2} (default), {TINY}, or a checkpoint's folder")
    add("--replicas", type=_count, metavar="N", help="vLLM engines (default 2)")
    add("--steps", type=_count, metavar="N", help=f"optimizer steps (default {STEPS})")
    add("--seed", type=int, default=0, metavar="N", help="of problems and of training (default 0)")
    add("--max-staleness", type=_lag, default=1, metavar="N", help="versions that a rollout may be old (default 1)")
    add("--run-dir", type=Path, metavar="DIR", help="where journals and results go (default runs/demo-TIME)")
    given = parser.parse_args(argv)
    tiny = given.model == TINY
    return Options(
        model=given.model,
        replicas=given.replicas or (1 if given.quick else 2),
        steps=given.steps or (QUICK_STEPS if given.quick else STEPS),
        seed=given.seed,
        max_staleness=given.max_staleness,
        run_dir=given.run_dir or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}",
        hyper=Hyper(learning_rate=1e-2) if tiny else Hyper(),
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _lag(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value
