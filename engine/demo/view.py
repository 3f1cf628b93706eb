"""What the terminal shows: a live picture, or one line a step where there is no terminal, and a table at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pitstop.engine.demo.options import Options
from pitstop.engine.demo.progress import Progress, Step
from pitstop.engine.demo.witness import Witness

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from pitstop.telemetry.live import Live as Replicas

BARS: Final = "▁▂▃▄▅▆▇█"
SHOWN: Final = 8
COLUMNS: Final = ("step", "reward", "loss", "drift", "lag", "train s", "refit s", "bubble s")


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Draw values from 0 to 1, the latest `width` of them."""
    top = len(BARS) - 1
    return "".join(BARS[min(top, max(0, round(value * top)))] for value in values[-width:])


def _cells(step: Step) -> list[str]:
    refit = step.refit
    return [
        str(step.step),
        f"{step.reward:.3f}",
        f"{step.loss:+.2f}",
        f"{step.drift:.3f}",
        f"{step.staleness:.1f}",
        f"{step.train_seconds:.2f}",
        "..." if refit is None else f"{refit.seconds:.2f}",
        "..." if refit is None else "-" if refit.bubble is None else f"{refit.bubble:.2f}",
    ]


class View:
    """Shows a run on a console."""

    def __init__(self, console: Console, options: Options, progress: Progress, replicas: Replicas) -> None:
        self._console, self._options = console, options
        self._progress, self._replicas = progress, replicas
        self._printed = 0
        self._stage = ""

    @contextmanager
    def live(self) -> Iterator[None]:
        """Keep the picture current until left. Nothing is drawn where there is no terminal: call `tick` there."""
        if not self._console.is_terminal:
            yield
            return
        from rich.live import Live

        with Live(
            get_renderable=self.picture,
            console=self._console,
            refresh_per_second=4,
            transient=True,
            # They go to the log, by descriptor.
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield

    def tick(self) -> None:
        """Print what is new, one line a step."""
        if self._console.is_terminal:
            return
        progress = self._progress
        for step in progress.trained[self._printed :]:
            if step.refit is None and step is progress.trained[-1] and progress.ended is None:
                break
            self._printed += 1
            named = zip(COLUMNS, _cells(step), strict=True)
            line = "  ".join(f"{name} {cell}" for name, cell in named)
            self._console.print(f"[{step.at:6.1f} s] {line}", markup=False, soft_wrap=True)
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._console.print(f"[{time.monotonic() - progress.begun:6.1f} s] {self._stage}", markup=False)

    def picture(self) -> Group:
        """Return the whole picture."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        progress, options = self._progress, self._options
        done = len(progress.trained)
        head = Text.assemble(
            ("Pitstop demo  ", "bold"),
            f"GRPO on {options.model}, {options.fleet}, staleness at most {options.max_staleness}\n",
            (f"{options.task.title}\n", "dim"),
            (f"{progress.stage}", "cyan"),
            f"   step {done}/{progress.steps}   {time.monotonic() - progress.begun:.0f} s",
        )
        parts: list[RenderableType] = [Panel(head)]
        if done:
            reward = Text.assemble(
                "reward  ",
                (sparkline(progress.rewards), "green"),
                f"  {progress.rewards[-1]:.2f}\n",
                f"{progress.rate:.0f} tok/s   {progress.answers} answers, {progress.crossed} of them across a refit, "
                f"{progress.stale} groups too stale",
            )
            parts += [reward, self._steps(progress.trained[-SHOWN:])]
        if self._replicas.rows:
            parts.append(self._replicas.render())
        if progress.across is not None:
            parts.append(story(progress.across))
        if progress.sample:
            parts.append(Text(f"latest: {progress.sample}", style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*parts)

    def _steps(self, steps: Sequence[Step]) -> Table:
        from rich.table import Table

        table = Table()
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for step in steps:
            table.add_row(*_cells(step))
        return table

    def closing(self) -> None:
        """Print the result, where it is, and what to look at next."""
        from rich.table import Table

        progress = self._progress
        if not progress.trained:
            return
        table = Table(title="What came out", show_header=False)
        for name, value in summary(progress):
            table.add_row(name, value)
        self._console.print(table)
        for line in next_steps(self._options.run_dir):
            self._console.print(line, highlight=False, soft_wrap=True)


def story(witness: Witness) -> Text:
    """Show a stream that went on across a refit, each part with the version that made it."""
    from rich.text import Text

    text = Text("a stream across a refit: ", overflow="ellipsis", no_wrap=True)
    for version, piece in witness.pieces:
        text.append(f"[v{version}]", style="bold magenta")
        # Newlines and whatever else a model of this size comes up with.
        text.append("".join(character if character.isprintable() else " " for character in piece), style="dim")
    return text


def summary(progress: Progress) -> list[tuple[str, str]]:
    """Return the result as names and values."""
    first, last = progress.gain()
    rows = [
        ("steps", str(len(progress.trained))),
        ("reward over time", sparkline(progress.rewards, 40)),
        ("mean reward, first and last steps", f"{first:.3f} -> {last:.3f}  ({last - first:+.3f})"),
    ]
    if progress.before is not None and progress.after is not None:
        rows.append(("greedy score on the examination", f"{progress.before:.3f} -> {progress.after:.3f}"))
    rows.append(("rollouts", f"{progress.answers} answers, {progress.tokens} tokens, {progress.rate:.0f} tok/s"))
    stalest = max(step.stalest for step in progress.trained)
    rows.append(("answers that span a refit", f"{progress.crossed}; oldest trained on: {stalest} versions"))
    if progress.witnesses:
        pause = f"longest pause {progress.longest_pause:.2f} s"
        rows.append(("streams read across a refit", f"{progress.witnesses}, {progress.broken} broken, {pause}"))
    if refits := progress.refits:
        seconds = statistics.median(refit.seconds for refit in refits)
        size = refits[-1].nbytes / 1e6
        rows.append(("refits", f"{len(refits)} x {size:.3g} MB, median {seconds:.2f} s, by {refits[-1].transport}"))
        bubbles = [refit.bubble for refit in refits if refit.bubble is not None]
        if bubbles:
            rows.append(("bubble", f"median {statistics.median(bubbles):.2f} s, longest {max(bubbles):.2f} s"))
    total = (progress.ended or time.monotonic()) - progress.begun
    rows.append(("time", f"{total:.0f} s"))
    return rows


def next_steps(run_dir: Path) -> list[str]:
    """Say where to look next."""
    return [
        f"Run folder: {run_dir}",
        "  steps.jsonl, result.json    what is above, step by step",
        "  fleet-*.jsonl, trainer-*.jsonl    spans of every refit and phase (OTLP JSON lines)",
        "  engine.log    what vLLM and the trainer said",
    ]
