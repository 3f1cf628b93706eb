"""Carries spans and numbers on to a collector, from a thread beside the outbox's: a slow one must not delay journals.

Nobody waits for a collector but this thread. One that fails is left alone for a while, longer each time, for asking it
costs the process time; meanwhile what it may yet take waits, and of too much the oldest is dropped. Numbers are
cumulative, so only the newest wait, and an older set that was not sent is no loss.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from opentelemetry import context

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan

THREAD: Final = "pitstop-collector"

_MOST_WAITING: Final = 8_192
_BATCH: Final = 256
_PROBE: Final = (
    8  # spans that ask a collector which failed: to encode more of them in vain would cost the engine's loop
)
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_POLL: Final = 0.002


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request: all well unless `reason` says otherwise.

    Attributes:
        lost: how many of its items the collector refused; None if all of them are lost.
        again: the collector may take the same later.
        after: seconds to leave it alone, as it asked.
    """

    reason: str | None = None
    lost: int | None = None
    again: bool = False
    after: float = 0.0


class Post(Protocol):
    """A way to a collector. Neither method raises; both return within about `timeout` seconds."""

    def spans(self, batch: Sequence[ReadableSpan], timeout: float) -> Answer:
        """Send spans."""

    def numbers(self, data: MetricsData, timeout: float) -> Answer:
        """Send what was collected."""

    def close(self) -> None:
        """Give back connections."""


@dataclass(slots=True)
class Lane:
    """How one signal fares. A collector may take spans and know nothing of metrics."""

    signal: str
    failure: str = "closed"
    pause: float = 0.0
    not_before: float = 0.0

    def judge(self, answer: Answer) -> bool:
        """Return whether to go on; if not, the signal pauses."""
        if answer.reason is None or answer.lost is not None:
            self.pause = self.not_before = 0.0
            return True
        self.failure = answer.reason
        self.pause = min(max(2 * self.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        self.not_before = time.monotonic() + max(self.pause, min(answer.after, _LONGEST_PAUSE))
        return False


class Courier:
    """Queue and thread of one process. `connect` makes the way to the collector, anew after a fork."""

    def __init__(self, connect: Callable[[], Post], dropped: Callable[[str, str, int], None]) -> None:
        self._connect = connect
        self._dropped = dropped
        self._begin(connect())  # at once, so that a wrong setting is an error here

    def _begin(self, post: Post | None) -> None:
        self._post = post
        self._waiting: deque[ReadableSpan] = deque()
        self._held: list[ReadableSpan] = []
        self._numbers: MetricsData | None = None
        self._lanes = Lane("span"), Lane("metric")
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._tickets = itertools.count(1)
        self._asked = self._done = 0
        self._until: float | None = None
        self._given_up = False

    def forked(self) -> None:
        """Be the courier of a child that was just forked: no connection is shared with the parent."""
        if self._wake >= 0:
            os.close(self._wake)
        self._begin(None)

    def spans(self, batch: Sequence[ReadableSpan]) -> None:
        """Take spans. Called by one thread, the outbox's."""
        self._waiting.extend(batch)
        surplus = 0
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            surplus += 1
        if surplus:
            self._dropped("span", "queue_full", surplus)
        self._ring()

    def numbers(self, data: MetricsData) -> None:
        """Take what was collected, in the place of what was collected before. Called by the outbox's thread."""
        self._numbers = data
        self._ring()

    def flush(self, timeout: float) -> bool:
        """Try what waits, at once; return whether the collector has taken it all in time. Takes no lock."""
        if self._thread is None:
            return self._empty()
        ticket = next(self._tickets)
        self._asked = ticket
        os.eventfd_write(self._wake, 1)
        limit = time.monotonic() + timeout
        while self._done < ticket and self._thread.is_alive() and time.monotonic() < limit:
            time.sleep(_POLL)
        return self._done >= ticket and self._empty()

    def finish(self, timeout: float) -> None:
        """Try what waits for the last time, count what stays behind, end the thread. Called by the outbox's thread."""
        self._until = time.monotonic() + timeout
        self.flush(timeout)
        self._given_up = True
        for lane, left in zip(
            self._lanes, (len(self._waiting) + len(self._held), self._numbers is not None), strict=True
        ):
            if left:
                self._dropped(lane.signal, lane.failure if self._done >= self._asked else "timeout", int(left))
        self._waiting.clear()

    def _empty(self) -> bool:
        return not self._waiting and not self._held and self._numbers is None

    def _ring(self) -> None:
        if self._thread is None:
            self._wake = os.eventfd(0)
            self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        # Instrumentation of HTTP clients that the program has would make spans of our requests, and those new requests.
        for key in (context._SUPPRESS_INSTRUMENTATION_KEY, context._SUPPRESS_HTTP_INSTRUMENTATION_KEY):
            context.attach(context.set_value(key, True))
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        ending = False
        while not ending:
            if poll.poll(self._rest()):
                os.eventfd_read(self._wake)
            asked, ending = self._asked, self._until is not None
            try:
                self._send(at_once=ending or asked > self._done)
            except Exception:  # noqa: BLE001
                for lane in self._lanes:
                    lane.judge(Answer("exporter_failed"))
            self._done = max(self._done, asked)
        if self._post is not None:
            self._post.close()

    def _rest(self) -> float | None:
        """Milliseconds until something is due; None if nothing will be before the next ring."""
        spans, numbers = self._lanes
        due = [spans.not_before] if self._held or self._waiting else []
        due += [numbers.not_before] if self._numbers is not None else []
        return max(0.0, min(due) - time.monotonic()) * 1e3 if due else None

    def _send(self, *, at_once: bool) -> None:
        """Send until nothing waits or something fails. `at_once` minds no pause."""
        if self._post is None:
            self._post = self._connect()
        spans, numbers = self._lanes
        going = at_once or time.monotonic() >= spans.not_before
        while going and (self._held or self._waiting) and not self._given_up:
            while self._waiting and len(self._held) < (_PROBE if spans.pause else _BATCH):
                try:
                    self._held.append(self._waiting.popleft())
                except IndexError:  # dropped in this moment, as the oldest
                    break
            batch = self._held
            answer = self._post.spans(batch, self._limit())
            if answer.again and not self._given_up:
                self._waiting.extendleft(reversed(batch))
            self._held = []
            going = self._judged(spans, len(batch), answer)
        data = self._numbers
        if data is not None and (at_once or time.monotonic() >= numbers.not_before) and not self._given_up:
            answer = self._post.numbers(data, self._limit())
            if self._numbers is data and not answer.again:
                self._numbers = None
            self._judged(numbers, 1, answer)

    def _judged(self, lane: Lane, count: int, answer: Answer) -> bool:
        """Count what the answer says is lost; return whether to go on."""
        if answer.reason is not None and not answer.again and not self._given_up:
            lost = count if answer.lost is None else min(max(answer.lost, 0), count)
            if lost:
                self._dropped(lane.signal, answer.reason, lost)
        return lane.judge(answer)

    def _limit(self) -> float:
        """Seconds that a request may take; at the end, a little less than `finish` waits."""
        return float("inf") if self._until is None else max(0.1, self._until - time.monotonic() - 0.2)
