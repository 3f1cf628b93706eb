"""What a worker does between two steps of a model, where every millisecond is one without a token."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pitstop.engine.errors import LocalError
from pitstop.engine.vllm_backend import worker
from pitstop.engine.vllm_backend.worker import WorkerSide, receiver_class
from pitstop.engine.worker_ports import WorkerOp, WorkerReply


def side() -> WorkerSide:
    config = SimpleNamespace(additional_config={}, parallel_config=SimpleNamespace(world_size=1))
    return WorkerSide(SimpleNamespace(rank=0, device=torch.device("cpu"), vllm_config=config))


def test_what_is_being_given_back_is_free_when_a_worker_says_what_is() -> None:
    made, freed = side(), list[bool]()

    def close() -> None:
        time.sleep(0.1)
        freed.append(True)

    thread = threading.Thread(target=close)
    thread.start()
    made._closing = [thread]
    layout = made.describe(WorkerOp("describe"), WorkerReply(0)).layout
    assert layout is not None
    assert freed == [True]


def test_receivers_that_do_not_close_hold_the_model_up_once_and_not_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_CLOSING_SECONDS", 0.2)
    made, never, waits = side(), threading.Event(), list[float]()

    class Stuck(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            waits.append(timeout or 0.0)
            super().join(timeout)

    made._closing = [Stuck(target=never.wait) for _ in range(3)]
    for thread in made._closing:
        thread.start()
    made.describe(WorkerOp("describe"), WorkerReply(0))
    never.set()
    assert 0 < waits[0] <= 0.2
    assert waits[1:] == [0.0, 0.0]


def test_a_receiver_of_ours_is_found_without_a_look_at_all_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def entry_points(**how: Any) -> list[Any]:
        looked.append(how)
        return [SimpleNamespace(value="somebody.else:Receiver")]

    monkeypatch.setattr(worker, "entry_points", entry_points)
    worker._declared.cache_clear()
    try:
        assert receiver_class("pitstop.transports.receiver:SegmentReceiver").__name__ == "SegmentReceiver"
        assert looked == []
        for _ in range(2):
            with pytest.raises(LocalError, match="there is no receiver"):
                receiver_class("somebody.else:Receiver")
            with pytest.raises(LocalError, match="neither"):
                receiver_class("os:system")
        assert len(looked) == 1
    finally:
        worker._declared.cache_clear()
