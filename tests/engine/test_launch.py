"""What `RolloutEngine.launch` says of arguments before anything is started, and how long a start may take."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from pitstop.engine import Deadlines, RolloutEngine
from pitstop.engine.errors import DeadlineExceeded, UnsupportedPolicy
from pitstop.engine.simulated import Delays, SimulatedBackend


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replcias": 2}, r"no options named replcias.*did you mean replicas\?"),
        ({"max_model_len": 512}, r"no options named max_model_len.*engine_args=\{'max_model_len': 512\}"),
        ({"seat": None}, "no options named seat"),
        ({"receivers": ()}, "no options named receivers"),
        ({"drafter": "train"}, "drafter 'train' is not one of trained, frozen"),
        ({"replicas": "2"}, "replicas is '2', not a number from 1 on"),
        ({"replicas": 0}, "replicas is 0, not a number from 1 on"),
        ({"replicas": 2, "devices": [0, 1]}, r"devices\[0\] is 0, not a sequence.*\[\['0'\], \['1'\]\]"),
        # Taken letter by letter, it would be the GPUs 1 and 0.
        ({"devices": ["10"]}, r"devices\[0\] is '10', not a sequence"),
        ({"boot_seconds": 0}, "boot"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_at_once_and_says_what_can(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedPolicy, match=said):
        RolloutEngine.launch("nowhere", **options)


def test_what_is_described_with_every_default_starts_nothing_and_has_the_deadline_of_a_boot() -> None:
    engine = RolloutEngine.launch("nowhere", replicas=2, devices=[["0"], [0]], drafter="frozen")
    assert {replica.boot_seconds for replica in engine.replicas} == {Deadlines().boot}


def test_every_argument_of_a_launch_is_explained() -> None:
    text = inspect.getdoc(RolloutEngine.launch) or ""
    for name in inspect.signature(RolloutEngine.launch).parameters:
        assert f"\n    {name}: " in text, name


async def test_how_long_a_start_may_take_is_the_callers_to_say_also_for_a_restart() -> None:
    slow = SimulatedBackend(delays=Delays(boot=5))
    with pytest.raises(DeadlineExceeded, match=r"boot did not end within 0\.05 s"):
        async with asyncio.timeout(4), RolloutEngine([slow], boot_seconds=0.05):
            pass
    backend = SimulatedBackend(delays=Delays(boot=0.001))
    async with asyncio.timeout(4), RolloutEngine([backend], boot_seconds=0.05) as engine:
        backend.delays = Delays(boot=5)
        backend.die()
        with pytest.raises(DeadlineExceeded, match=r"boot did not end within 0\.05 s"):
            await engine.restart()
