"""What goes into an engine's processes with their configuration."""

from __future__ import annotations

import copy
import multiprocessing
import os
from typing import Any

import pytest

from pitstop.engine.vllm_backend.watch import FRONTEND, Carried

NAME = "PITSTOP_TEST_CARRIED"


def say(answers: Any, carried: dict[str, Any]) -> None:
    """In the child, which has unpacked its arguments."""
    answers.put((os.environ.get(NAME), carried["tied"]))


def test_a_spawned_process_has_its_own_environment_before_it_does_anything_and_its_parent_never_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FRONTEND, str(os.getpid()))
    monkeypatch.delenv(NAME, raising=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    found = []
    for value in ("one", "two"):
        carried = Carried(tied={"a": "b"}, environment={NAME: value})
        assert copy.deepcopy(carried) == carried
        child = context.Process(target=say, args=(answers, carried))
        child.start()
        found.append(answers.get(timeout=60))
        child.join(60)
    assert found == [("one", {"a": "b"}), ("two", {"a": "b"})]
    assert NAME not in os.environ
