"""The courier with a collector that does as it is told, and no clock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pitstop.telemetry import collector
from pitstop.telemetry.collector import Answer, Courier, Lane

LONG = 20.0


class FakePost:
    """Keeps what it is sent and answers as told; what is sent is plain numbers here."""

    def __init__(self, answer: Callable[[], Answer] = Answer) -> None:
        self.answer = answer
        self.batches: list[list[Any]] = []
        self.limits: list[float] = []
        self.asked = threading.Event()

    def spans(self, batch: Sequence[Any], timeout: float) -> Answer:
        self.batches.append(list(batch))
        self.limits.append(timeout)
        self.asked.set()
        return self.answer()

    def numbers(self, data: Any, timeout: float) -> Answer:
        return self.spans([data], timeout)

    def close(self) -> None:
        """Nothing is open."""


class Losses(Counter[tuple[str, str]]):
    def add(self, signal: str, reason: str, count: int) -> None:
        self[signal, reason] += count


def items(*numbers: int) -> Any:
    return numbers


def test_the_queue_is_bounded_and_the_oldest_go_first() -> None:
    gate, losses = threading.Event(), Losses()

    def wait() -> Answer:
        gate.wait(LONG)
        return Answer()

    post = FakePost(wait)
    courier = Courier(lambda: post, losses.add)
    courier.spans(items(-1))
    assert post.asked.wait(LONG)
    courier.spans(items(*range(10_000)))
    gate.set()
    assert courier.flush(LONG)
    assert losses == {("span", "queue_full"): 10_000 - 8_192}
    assert [n for batch in post.batches for n in batch] == [-1, *range(10_000 - 8_192, 10_000)]
    assert max(map(len, post.batches)) == 256
    courier.finish(LONG)


def test_a_collector_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_FIRST_PAUSE", 3_600.0)
    monkeypatch.setattr(collector, "_LONGEST_PAUSE", 3_600.0)
    losses, post = Losses(), FakePost(lambda: Answer("unreachable", again=True))
    courier = Courier(lambda: post, losses.add)
    courier.spans(items(0))
    assert not courier.flush(LONG)
    for n in range(1, 20):
        courier.spans(items(n))
    asked = len(post.batches)
    courier.finish(LONG)
    assert post.batches[asked:] == [list(range(8))], "but for one more small question, at the end"
    assert {len(batch) for batch in post.batches[:asked]} == {1}
    assert post.limits[-1] < LONG
    assert losses == {("span", "unreachable"): 20}


def test_pauses_grow_to_a_bound_and_end_with_a_success() -> None:
    lane = Lane("span")
    pauses = []
    for _ in range(8):
        assert not lane.judge(Answer("timeout", again=True, after=1e9))
        pauses.append(lane.pause)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert lane.judge(Answer("rejected", lost=3))
    assert (lane.pause, lane.not_before) == (0, 0)


def test_of_numbers_only_the_newest_wait_and_an_older_set_is_no_loss() -> None:
    losses, post = Losses(), FakePost(lambda: Answer("http_503", again=True))
    courier = Courier(lambda: post, losses.add)
    for data in ("old", "older", "new"):
        courier.numbers(data)  # type: ignore[arg-type]
    assert not courier.flush(LONG)
    post.answer = Answer
    assert courier.flush(LONG)
    assert post.batches[-1] == ["new"]
    courier.finish(LONG)
    assert losses == {}


def test_a_fault_of_our_own_ends_neither_the_thread_nor_the_process() -> None:
    def fault() -> Answer:
        raise ZeroDivisionError

    losses, post = Losses(), FakePost(fault)
    courier = Courier(lambda: post, losses.add)
    courier.spans(items(1, 2))
    assert not courier.flush(LONG)
    post.answer = Answer
    assert courier.flush(LONG)
    post.answer = fault
    courier.spans(items(3))
    courier.finish(LONG)
    assert losses == {("span", "exporter_failed"): 1}


def test_an_end_with_nothing_sent_starts_no_thread() -> None:
    losses = Losses()
    courier = Courier(FakePost, losses.add)
    assert courier.flush(LONG)
    courier.finish(LONG)
    assert losses == {}
