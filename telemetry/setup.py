"""Turns telemetry on for one process.

    with telemetry.configure("runs/7", role="trainer"):
        ...

Call it before vLLM's `AsyncLLM` is constructed: OpenTelemetry takes the first provider that is set and refuses every
other one, and only under ours do vLLM's `llm_request` spans land in the journal, beneath the request that they are of.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Literal, Self

from pitstop.engine.errors import LocalError, UnsupportedPolicy
from pitstop.engine.ports import Observer, install_observer
from pitstop.telemetry import names
from pitstop.telemetry.collector import Courier, Post
from pitstop.telemetry.endpoint import connector, trouble, whereabouts
from pitstop.telemetry.metrics import Instruments
from pitstop.telemetry.observer import SpanObserver
from pitstop.telemetry.tee import Tee

log = logging.getLogger("pitstop.telemetry")

Role = Literal["trainer", "fleet", "replica"]
ROLES: Final[tuple[Role, ...]] = ("trainer", "fleet", "replica")
LIMIT: Final = 2.0
"""Seconds that a process's end may wait for its journals, and as many again for a collector."""

_METRICS_EVERY: Final = 10  # periods of the outbox
_TERM: Final = signal.SIGTERM


class AlreadyConfigured(LocalError):
    """Raised when telemetry is configured while it is on. Close the first one before."""

    slug = "already_configured"


def configure(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    role: Role = "fleet",
    run_id: str | None = None,
    level: int = 1,
    sample: float = 0.05,
    endpoint: str | None = None,
) -> Telemetry:
    """Turn telemetry on until the returned context manager is left, or the process ends.

    Spans go to `<run_dir>/<role>-<instance>.jsonl` within half a second, numbers to `<role>-<instance>.metrics.jsonl`
    every five. Without `run_dir` no journal is written, without `endpoint` nothing is sent; what `Telemetry.add` adds
    sees everything in any case. A provider that the program has set is used instead of ours, with its own sampler and
    exporters; `run_dir` and `endpoint` then add our ways out to it, for spans. Numbers go to its MeterProvider alone.

    The journals are complete after a normal exit, after SIGTERM, and in children made by fork (spans only) or, once
    they have called this themselves, by spawn; a SIGKILL costs the last half second. For SIGTERM a handler is set if
    the signal has its default effect and this is the main thread; the process still dies by the signal.

    A collector gets what it takes. One that is dead, slow or wrong costs its own spans and numbers and nothing else:
    a thread of its own asks it, less and less often up to every 30 s, and 8,192 spans wait for it. The end waits two
    seconds for it at most. What is lost is counted in the metric `rl.telemetry.dropped`, by signal and by a reason of
    `names.DROPPED`, and reported by one warning in the log `pitstop.telemetry` when telemetry is turned off.

    Args:
        run_dir: the folder of the journals.
        role: what this process is, as resource attribute and in the journals' names.
        run_id: names the run; by default the folder's name, without one a random one.
        level: 1 has the spans of refits and replicas, all of them; 2 those of some requests as well.
        sample: from 0 to 1: how many of the requests that belong to no trace have a span at level 2. One that belongs
            to a trace has it if the trace is sampled, and one that a refit held or that failed has it in any case.
        endpoint: base URL of a collector that speaks OTLP/HTTP (protobuf), such as `http://localhost:4318`; the paths
            `/v1/traces` and `/v1/metrics` are added. "env" takes it from OTEL_EXPORTER_OTLP_ENDPOINT, or from
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_METRICS_ENDPOINT. In either case OpenTelemetry's
            other variables hold: OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _COMPRESSION, _CERTIFICATE.

    Raises:
        AlreadyConfigured: it is on.
        UnsupportedPolicy: an option has no such value.
        ExporterMissing: there is an endpoint, but not the extra `otlp`.
    """
    for wrong, text in (
        (role not in ROLES, f"role {role!r} is not one of {', '.join(ROLES)}"),
        (level not in (1, 2), f"level {level} is neither 1 nor 2"),
        (not 0 <= sample <= 1, f"sample {sample} is not from 0 to 1"),
    ):
        if wrong:
            raise UnsupportedPolicy(text)
    if endpoint is not None and (fault := trouble(endpoint)):
        raise UnsupportedPolicy(fault)
    if _active and _active[0].inherited:
        _active[0].close()
    if _active:
        raise AlreadyConfigured("telemetry is on in this process; leave the first `configure` before the second")
    connect = None if endpoint is None else connector(endpoint)
    where = None if endpoint is None else whereabouts(endpoint)
    return Telemetry(Path(run_dir) if run_dir is not None else None, role, run_id, level, sample, connect, where)


class Telemetry:
    """What `configure` turned on.

    Attributes:
        instance: names this process, in the journals' names and as `service.instance.id`.
        run_id: names the run, by default after its folder.
    """

    def __init__(
        self,
        run_dir: Path | None,
        role: Role,
        run_id: str | None,
        level: int,
        sample: float,
        connect: Callable[[], Post] | None = None,
        where: str | None = None,
    ) -> None:
        from pitstop.telemetry import providers
        from pitstop.telemetry.outbox import Outbox

        self._run_dir, self._role, self._where = run_dir, role, where
        self.run_id = run_id or (run_dir.resolve().name if run_dir is not None else secrets.token_hex(4))
        self.instance = _instance()
        self._periods, self._unwritten, self._closed, self._reported = 0, False, False, False
        described = providers.resource(role, self.instance, self.run_id)
        self._courier = courier = None if connect is None else Courier(connect, self._lost)
        numbers, spans = (None, None) if courier is None else (courier.numbers, courier.spans)
        meter, self._collect = providers.meter(described, self._journal(".metrics.jsonl"), numbers)
        self._instruments = Instruments(meter)
        dropped = self._instruments.dropped
        self._outbox = Outbox(self.journal, dropped, self._chores, self._last_words, spans, self._epilogue)
        self._tee = Tee(self._instruments, dropped=dropped)
        self._spans: SpanObserver | None = None
        provider = self._foreign = providers.foreign()
        if provider is None and (run_dir is not None or courier is not None):
            provider = providers.make(described, self._outbox)
            providers.share(described, self._outbox)
        elif provider is not None and (run_dir is not None or courier is not None):
            providers.attach(provider, self._outbox)
        if provider is not None:
            tracer = provider.get_tracer(names.SCOPE)
            self._spans = SpanObserver(tracer, level=level, sample=sample, dropped=dropped)
            self._tee.observers = (self._spans, self._instruments)
        self.inherited = False
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def journal(self) -> Path | None:
        """Where this process's spans go."""
        return self._journal(".jsonl")

    def add(self, observer: Observer) -> None:
        """Tell another observer, too, what happens: a live view, say."""
        self._tee.observers = (*self._tee.observers, observer)

    def flush(self, timeout: float = LIMIT) -> bool:
        """Write what there is, and send it; False if it is not all written, or not taken, in `timeout` seconds."""
        limit = time.monotonic() + timeout
        written = self._outbox.flush(timeout)
        return written and (self._courier is None or self._courier.flush(max(0.0, limit - time.monotonic())))

    def close(self) -> None:
        """Turn it off. Spans that are open are written as cut short. Idempotent.

        Waits two seconds at most, four with an endpoint. Logs what was lost.
        """
        if self._closed:
            return
        from pitstop.telemetry import providers

        self._closed = True
        install_observer(None)
        self._tee.observers = ()
        if not self._outbox.flush(self._limit, ending=True):
            self._instruments.fold()
            self._report()
        providers.RELAY.target = None
        _active.clear()
        atexit.unregister(self.close)
        self._final.cancel()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(_TERM) == self._terminated:
            signal.signal(_TERM, signal.SIG_DFL)

    def _begin(self) -> None:
        _active.append(self)
        atexit.register(self.close)
        self._finalize()
        util.register_after_fork(self, Telemetry._finalize)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(_TERM) is signal.SIG_DFL:
            signal.signal(_TERM, self._terminated)
        self._outbox.start()
        install_observer(self._tee)

    def _journal(self, ending: str) -> Path | None:
        return None if self._run_dir is None else self._run_dir / f"{self._role}-{self.instance}{ending}"

    def _chores(self, flushing: bool) -> None:
        """Run by the outbox's thread, twice a second and at a flush."""
        self._unwritten = self._instruments.fold() or self._unwritten
        self._periods += 1
        if self._unwritten and (flushing or self._periods % _METRICS_EVERY == 0):
            self._unwritten = False
            self._collect()

    def _last_words(self) -> None:
        if self._spans is not None:
            self._spans.cut()

    def _epilogue(self) -> None:
        if self._courier is not None:
            self._courier.finish(LIMIT)
        self._instruments.fold()
        self._report()

    def _report(self) -> None:
        losses = self._instruments.losses()
        if losses and not self._reported:
            self._reported = True
            told = ", ".join(f"{count} {signal} ({reason})" for (signal, reason), count in losses.items())
            log.warning("telemetry lost %s%s", told, "" if self._where is None else f"; collector: {self._where}")

    def _lost(self, signal: str, reason: str, count: int) -> None:
        self._instruments.dropped(signal, reason, count)

    @property
    def _limit(self) -> float:
        return LIMIT if self._courier is None else 2 * LIMIT

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Write everything, then die by the signal as if nobody had looked. Takes no lock, waits a bounded time."""
        self._outbox.flush(self._limit, ending=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _forked(self) -> None:
        """Run in a child right after the fork: what the parent has begun is the parent's to finish."""
        from pitstop.telemetry import providers

        self.inherited = True
        self.instance = _instance()
        self._instruments.mute()
        if self._courier is not None:
            self._courier.forked()
        self._outbox.forked(self.journal)
        self._tee.observers = ()
        if self._spans is not None:
            described = providers.resource(self._role, self.instance, self.run_id)
            provider = self._foreign or providers.make(described, self._outbox)
            self._spans.forget(provider.get_tracer(names.SCOPE))
            self._tee.observers = (self._spans,)

    def _finalize(self) -> None:
        # A child that multiprocessing has forked ends without `atexit`, by this list, which is emptied as it starts.
        self._final = util.Finalize(None, self.close, exitpriority=-100)


_active: list[Telemetry] = []


def _instance() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def _after_fork() -> None:
    for telemetry in _active:
        telemetry._forked()


os.register_at_fork(after_in_child=_after_fork)
