from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pitstop.engine.demo import command
from pitstop.engine.demo.options import QUICK_STEPS, STEPS, parse
from pitstop.engine.demo.task import Addition, Letters


def test_the_plain_command_trains_smollm2_on_two_replicas() -> None:
    options = parse([])
    assert (options.model, options.replicas, options.steps, options.max_staleness) == ("smollm2", 2, STEPS, 1)
    assert isinstance(options.task, Addition)
    assert options.run_dir.parent == Path("runs")


def test_quick_means_less_of_everything_that_was_not_asked_for() -> None:
    options = parse(["--quick"])
    assert (options.replicas, options.steps) == (1, QUICK_STEPS)
    options = parse(["--quick", "--replicas", "3", "--steps", "4"])
    assert (options.replicas, options.steps) == (3, 4)


def test_random_weights_get_a_task_that_they_can_begin_with() -> None:
    assert isinstance(parse(["--model", "tiny"]).task, Letters)


@pytest.mark.parametrize("wrong", [["--replicas", "0"], ["--steps", "-1"], ["--max-staleness", "-1"], ["--seed", "x"]])
def test_options_that_make_no_sense_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_help_needs_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pitstop.engine.demo import run\n"
        "try:\n    run(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'vllm', 'transformers', 'rich'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--max-staleness" in done.stdout


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    assert command.main([]) == 1
    assert "pitstop demo needs gguf. `make demo`" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert command.main(["--model", "tiny", "--run-dir", str(tmp_path / "file" / "run")]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_what_children_print_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with command._quiet(tmp_path / "log") as (out, err):
        os.write(1, b"noise\n")
        subprocess.run([sys.executable, "-c", "import sys; print('more noise', file=sys.stderr)"], check=True)
        out.write("shown\n")
        err.write("failed\n")
    os.write(1, b"after\n")
    assert (tmp_path / "log").read_text() == "noise\nmore noise\n"
    said = capfd.readouterr()
    assert (said.out, said.err) == ("shown\nafter\n", "failed\n")
