"""Carries finished spans and numbers to the journals of this process and its courier, from a thread of its own.

The engine's threads only append. The SDK's batch processor is not used, for three reasons: what its full queue loses
is not counted, its locks may be held by the very thread that a signal interrupts, and a lock that some thread held at
a fork stays held in the child. Here a flush takes no lock, so it may be asked for in a signal handler, and a forked
child starts with a new queue, a new thread and a new file.
"""

from __future__ import annotations

import io
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.file import FileSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from pitstop.telemetry.spans import Drop

PERIOD: Final = 0.5
_MOST_WAITING: Final = 65_536
_BATCH: Final = 256
_POLL: Final = 0.002


class Lines:
    """A journal that is appended to, readable by its owner only.

    Nothing is buffered: what a buffer holds at a fork would be written by both processes.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._torn = False

    def write(self, text: str) -> None:
        """Append whole lines. After a failure in the middle of one, the next begins on a line of its own."""
        rest = memoryview((("\n" if self._torn else "") + text).encode())
        self._torn = True
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Outbox(SpanProcessor):
    """Queue, thread and file of one process.

    All that it is given runs in the thread: `chores` every half second and at a flush, `pass_on` with each batch,
    `last_words` once, at the flush that ends it all, and `epilogue` when everything else is done.
    """

    def __init__(
        self,
        path: Path | None,
        dropped: Drop,
        chores: Callable[[bool], None] = lambda flushing: None,
        last_words: Callable[[], None] = lambda: None,
        pass_on: Callable[[Sequence[ReadableSpan]], None] | None = None,
        epilogue: Callable[[], None] = lambda: None,
    ) -> None:
        self._dropped = dropped
        self._chores = chores
        self._last_words = last_words
        self._pass_on = pass_on
        self._epilogue = epilogue
        self._file: Lines | None = None
        self._begin(path)
        if path is not None:
            self._file = Lines(path)  # at once, so that a folder that cannot be written to is an error here

    def _begin(self, path: Path | None) -> None:
        self._path = path
        self._queue: deque[ReadableSpan] = deque()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._wake = -1
        self._tickets = itertools.count(1)
        self._asked = self._done = 0
        self._ending = self._ended = False

    def forked(self, path: Path | None) -> None:
        """Be the outbox of a child that was just forked: leave everything to the parent, begin with nothing."""
        if self._wake >= 0:
            os.close(self._wake)
        self._file = None
        self._begin(path)
        self._chores = lambda flushing: None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        with self._starting:
            if self._thread is None and not self._ended:
                self._wake = os.eventfd(0)
                self._thread = threading.Thread(target=self._run, name="pitstop-telemetry", daemon=True)
                self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing to do."""

    def on_end(self, span: ReadableSpan) -> None:
        """Take a finished span."""
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if self._ended or len(self._queue) >= _MOST_WAITING:
            self._dropped("span", "closed" if self._ended else "queue_full")
            return
        self._queue.append(span)
        if self._thread is None:
            self.start()

    def force_flush(self, timeout_millis: int = 2_000) -> bool:
        """Write what is waiting; False if that took too long."""
        return self.flush(timeout_millis / 1e3)

    def shutdown(self) -> None:
        """Let the one who made it end it: a provider that is shared must not."""
        self.flush(2.0)

    def flush(self, timeout: float, *, ending: bool = False) -> bool:
        """Have everything written that was taken before the call; return whether that was done in time.

        Takes no lock: safe in a signal handler, whatever the interrupted thread holds.
        """
        if self._ended or self._thread is None:
            return not self._queue
        ticket = next(self._tickets)
        self._ending = self._ending or ending
        self._asked = ticket
        os.eventfd_write(self._wake, 1)
        limit = time.monotonic() + timeout
        while self._done < ticket and self._thread.is_alive() and time.monotonic() < limit:
            time.sleep(_POLL)
        return self._done >= ticket

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._ended:
            if poll.poll(PERIOD * 1e3):
                os.eventfd_read(self._wake)
            asked, ending = self._asked, self._ending
            self._guarded(self._write)
            if ending:
                self._guarded(self._last_words)
                self._guarded(self._write)
                self._ended = True
            self._guarded(partial(self._chores, asked > self._done))
            if ending:
                self._guarded(self._epilogue)
            self._done = max(self._done, asked)
        if self._file is not None:
            self._file.close()

    def _guarded(self, step: Callable[[], None]) -> None:
        """A fault in one step must not end the thread: what follows would be lost too."""
        try:
            step()
        except Exception:  # noqa: BLE001
            self._dropped("span", "outbox_failed")

    def _write(self) -> None:
        while self._queue and (self._path is not None or self._pass_on is not None):
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            if self._pass_on is not None:
                self._pass_on(batch)
            if self._path is None:
                continue
            lines = io.StringIO()
            try:
                FileSpanExporter(stream=lines).export(batch)
                if self._file is None:
                    self._file = Lines(self._path)
                self._file.write(lines.getvalue())
            except Exception:  # noqa: BLE001
                for _ in batch:
                    self._dropped("span", "exporter_failed")
