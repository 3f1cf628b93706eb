"""The trainer's process: learn from a batch, publish the new weights, take the next batch while they travel."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from pitstop.engine.demo import messages
from pitstop.engine.demo.grpo import Answer, Group
from pitstop.engine.demo.learner import Hyper, Learner
from pitstop.engine.errors import PitstopError
from pitstop.engine.refit import RefitReport

if TYPE_CHECKING:
    from pitstop.transports import Publisher, PublishHandle

REFIT_SECONDS = 120.0
Say = Callable[[messages.FromTrainer], None]


@dataclass(frozen=True, slots=True)
class Training:
    """What the trainer is started with."""

    checkpoint: Path
    run_dir: Path
    hyper: Hyper
    seed: int
    threads: int | None


def main(pipe: Connection, training: Training) -> None:
    """Run in a child made by spawn, until told to stop or until the parent is gone."""
    # Ctrl-C goes to every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True, name="parent-watch").start()

    speaking = threading.Lock()

    def say(message: messages.FromTrainer) -> None:
        with speaking:
            pipe.send_bytes(messages.packed(message))

    from pitstop.telemetry import configure

    try:
        with configure(training.run_dir, role="trainer"):
            _serve(pipe, training, say)
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001
        say(messages.Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _serve(pipe: Connection, training: Training, say: Say) -> None:
    from pitstop.transports import Publisher

    begun = time.perf_counter()
    learner = Learner(training.checkpoint, training.hyper, seed=training.seed, threads=training.threads)
    say(messages.Ready(learner.parameters, time.perf_counter() - begun))
    attend = messages.to_trainer(pipe.recv_bytes())
    if not isinstance(attend, messages.Attend):
        return
    with Publisher.connect(attend.address) as publisher:
        _train(pipe, learner, publisher, say)


def _train(pipe: Connection, learner: Learner, publisher: Publisher, say: Say) -> None:
    under_way: Refit | None = None
    while isinstance(batch := messages.to_trainer(pipe.recv_bytes()), messages.Batch):
        groups = [_group(record) for record in batch.groups]
        learned = learner.step(groups, free=under_way.sent if under_way else lambda: None)
        if under_way:
            under_way.join()
        # Before the refit's own report, whose version the parent would not know yet.
        say(messages.Trained(batch.weight_version, **asdict(learned)))
        under_way = Refit(
            publisher.publish(learner.named_parameters(), weight_version=batch.weight_version, cast="inventory"), say
        )
    if under_way:
        under_way.join()


class Refit:
    """A version on its way. Its report is passed on when it comes, while the trainer learns."""

    def __init__(self, handle: PublishHandle, say: Say) -> None:
        self._handle, self._say = handle, say
        self._thread = threading.Thread(target=self._report, name="refit-report", daemon=True)
        self._thread.start()

    def sent(self) -> None:
        """Return when the weights may change."""
        self._handle.sent.wait(REFIT_SECONDS)

    def join(self) -> None:
        """Return when the refit has ended.

        Raises:
            PitstopError: no replica took the version.
        """
        self._thread.join()
        self._handle.result(REFIT_SECONDS)

    def _report(self) -> None:
        with contextlib.suppress(PitstopError):
            self._say(_refitted(self._handle.result(REFIT_SECONDS)))


def _group(record: messages.GroupRecord) -> Group:
    return Group(record.prompt, [Answer(a.token_ids, a.logprobs, a.reward) for a in record.answers])


def _refitted(report: RefitReport) -> messages.Refitted:
    return messages.Refitted(
        report.weight_version,
        report.outcome.value,
        report.transport,
        report.nbytes,
        report.seconds,
        report.phase_seconds,
        report.bubble,
    )
