from __future__ import annotations

import io
import json
import re
from pathlib import Path

from rich.console import Console

from pitstop.engine.demo import messages
from pitstop.engine.demo.buffer import Rollout
from pitstop.engine.demo.grpo import Answer, Group
from pitstop.engine.demo.options import Options
from pitstop.engine.demo.progress import Progress
from pitstop.engine.demo.view import View, sparkline, summary
from pitstop.engine.demo.witness import Witness
from pitstop.telemetry.live import Live


def rollout(reward: float, version: int = 0) -> Rollout:
    return Rollout(Group([1, 2], [Answer([3, 4], [-1.0, -1.0], reward)] * 2), version, ("3 4", "3 4"), crossed=1)


def trained(version: int) -> messages.Trained:
    return messages.Trained(version, 0.25, 0.0, 0.01, 2.0, 1, 40, 1.5)


def refitted(version: int, bubble: float | None = 0.5) -> messages.Refitted:
    phases = {"suspend": 0.1, "receive": 0.2}
    return messages.Refitted(version, "committed", "shared_memory", 269_000_000, 0.75, phases, bubble)


def finished(steps: int) -> Progress:
    progress = Progress(steps, stage="training")
    for step in range(steps):
        rollouts = [rollout(step / steps, max(0, step - 1))]
        progress.generated(rollouts[0])
        progress.learned(trained(step + 1), rollouts)
        progress.refitted(refitted(step + 1, bubble=None if step else 0.5))
    progress.before, progress.after, progress.ended = 0.25, 0.75, progress.begun + 100
    return progress


def view(progress: Progress, folder: Path, *, terminal: bool = False, width: int = 80) -> tuple[View, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, no_color=True)
    return View(console, Options(run_dir=folder), progress, Live()), out


def test_first_and_last_steps_are_compared() -> None:
    assert finished(20).gain() == (0.1, 0.85)
    # Too few steps to compare five with five: they must not overlap.
    assert finished(4).gain() == (0.125, 0.625)
    assert finished(1).gain() == (0.0, 0.0)


def test_a_step_knows_how_old_its_rollouts_were_and_what_refit_followed() -> None:
    step = finished(3).trained[2]
    assert (step.staleness, step.stalest, step.answer_tokens) == (1.0, 1, 2.0)
    assert step.refit == refitted(3, bubble=None)


def test_the_run_folder_holds_every_step_and_the_result(tmp_path: Path) -> None:
    progress = finished(4)
    progress.write(tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0]["refit"]["phases"] == {"suspend": 0.1, "receive": 0.2}
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["reward_first"], result["reward_last"], result["accuracy_after"]) == (0.125, 0.625, 0.75)
    assert (result["answers"], result["tokens"], result["answers_across_versions"]) == (8, 16, 4)


def test_a_run_that_never_trained_leaves_a_folder_that_says_so(tmp_path: Path) -> None:
    Progress(3).write(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["reward_first"] is None
    shown, out = view(Progress(3), tmp_path)
    shown.closing()
    assert out.getvalue() == ""


def test_without_a_terminal_every_step_is_one_line_said_once_its_refit_is_over(tmp_path: Path) -> None:
    progress = Progress(2, stage="training")
    shown, out = view(progress, tmp_path)
    progress.learned(trained(1), [rollout(0.5)])
    shown.tick()
    assert [line.split("] ")[1] for line in out.getvalue().splitlines()] == ["training"]
    progress.refitted(refitted(1))
    shown.tick()
    shown.tick()
    said = out.getvalue().splitlines()
    assert len(said) == 2
    assert (
        "step 1  reward 0.500  loss +0.25  drift 0.010  lag 0.0  train s 1.50  refit s 0.75  bubble s 0.50" in said[1]
    )


def test_the_picture_fits_a_terminal_of_eighty_columns(tmp_path: Path) -> None:
    progress = finished(12)
    progress.sample = "What is 3 + 4?" + " 7" * 100
    shown, out = view(progress, tmp_path, terminal=True)
    shown._console.print(shown.picture())
    lines = re.sub(r"\x1b\[\d+m", "", out.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "GRPO on smollm2, 2 vLLM replicas, staleness at most 1" in text
    assert "step 12/12" in text
    assert "…" in lines[-1]


def test_the_end_says_what_came_out_and_where_it_is(tmp_path: Path) -> None:
    shown, out = view(finished(20), tmp_path, width=120)
    shown.closing()
    text = out.getvalue()
    for part in (
        "0.100 -> 0.850  (+0.750)",
        "0.250 -> 0.750",
        "20 x 269 MB, median 0.75 s, by shared_memory",
        "100 s",
        str(tmp_path),
    ):
        assert part in text


def test_a_stream_across_a_refit_shows_which_weights_made_which_words(tmp_path: Path) -> None:
    progress = finished(3)
    progress.saw(Witness([(6, " there was\n"), (7, " a car")], 5, 0.4))
    progress.saw(Witness([(7, "never crossed")], 5, 9.0))
    shown, out = view(progress, tmp_path, width=120)
    shown._console.print(shown.picture())
    assert "a stream across a refit: [v6] there was [v7] a car" in out.getvalue()
    assert ("streams read across a refit", "1, 0 broken, longest pause 0.40 s") in summary(progress)


def test_bars_follow_values_and_stay_in_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, 7.0, -1.0]) == "▁▅██▁"
    assert len(sparkline([0.5] * 100, width=10)) == 10
