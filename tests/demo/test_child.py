from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pitstop.engine.demo import messages
from pitstop.engine.demo.child import Trainer
from pitstop.engine.demo.learner import Hyper
from pitstop.engine.demo.trainer import Training
from pitstop.engine.errors import WorkerFailed


def training(folder: Path, checkpoint: Path) -> Training:
    return Training(checkpoint, folder, Hyper(), seed=0, threads=1)


@pytest.mark.parametrize(
    "message",
    [
        messages.Attend("ipc:///tmp/x"),
        messages.Batch(3, [messages.GroupRecord([1, 2], [messages.AnswerRecord([3], [-0.5], 1.0)])]),
        messages.Stop(),
    ],
)
def test_the_trainer_reads_what_the_parent_wrote(message: messages.ToTrainer) -> None:
    assert messages.to_trainer(messages.packed(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready(10, 1.5),
        messages.Trained(1, 0.5, 0.0, 0.1, 2.0, 3, 40, 1.0),
        messages.Refitted(1, "committed", "shared_memory", 100, 0.5, {"suspend": 0.1}, None),
        messages.Failed("x", "y"),
    ],
)
def test_the_parent_reads_what_the_trainer_wrote(message: messages.FromTrainer) -> None:
    assert messages.from_trainer(messages.packed(message)) == message


async def test_the_death_of_the_trainer_ends_every_wait(tmp_path: Path) -> None:
    async with Trainer(training(tmp_path, tmp_path)) as trainer:
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="status -9"):
            await asyncio.wait_for(trainer.hear(messages.Ready), 10)
        with pytest.raises(WorkerFailed, match="status -9"):
            await asyncio.wait_for(trainer.hear(messages.Trained), 10)


async def test_a_frozen_trainer_is_ended_with_its_context(tmp_path: Path) -> None:
    trainer = Trainer(training(tmp_path, tmp_path))
    await trainer.__aenter__()
    pid = trainer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(trainer.__aexit__(RuntimeError, None, None), 10)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_waiting_for_the_trainer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pitstop.engine.demo.child.SILENCE_SECONDS", 0.1)
    async with Trainer(training(tmp_path, tmp_path)) as trainer:
        with pytest.raises(WorkerFailed, match="owed a Ready message"):
            await trainer.hear(messages.Ready)


async def test_an_error_in_the_trainer_comes_with_its_traceback(tmp_path: Path) -> None:
    async with Trainer(training(tmp_path, tmp_path / "no-model")) as trainer:
        with pytest.raises(WorkerFailed, match=r"the trainer failed: .*no-model") as caught:
            await asyncio.wait_for(trainer.hear(messages.Ready), 60)
    assert "from_pretrained" in caught.value.remote_traceback
