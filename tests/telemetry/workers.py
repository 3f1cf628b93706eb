"""Processes for the tests of set-up: run as `python -m tests.telemetry.workers CASE RUN_DIR ...`.

Each runs in an interpreter of its own: telemetry is configured once a process, and a fork wants few threads around.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pitstop import telemetry
from pitstop.engine.errors import PitstopError
from pitstop.engine.ports import Work, default_observer


def five(prefix: str, headers: Mapping[str, str] | None = None) -> None:
    """Make five spans through the observer that the process has."""
    observer = default_observer()
    for n in range(5):
        observer.opened(Work("send_weights", f"send_weights:{prefix}{n}", time.time_ns(), headers=headers or {}))
        observer.closed(f"send_weights:{prefix}{n}", time.time_ns())


def say(*words: object) -> None:
    """Tell the test."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def hold(pipe: Connection) -> None:
    """Say that all is made, then wait to be killed."""
    pipe.send("ready")
    time.sleep(60)


def child(run_dir: str, method: str, ending: str, pipe: Connection) -> None:
    """A worker: a forked one inherits telemetry, a spawned one configures its own."""
    if method == "spawn" or ending == "cycle":
        telemetry.configure(run_dir, role="replica")
    five("child")
    if ending == "cycle":
        telemetry.setup._active[0].close()
        telemetry.configure(run_dir, role="replica")
        five("again")
    if ending in ("term", "kill"):
        hold(pipe)


def parent(run_dir: str, method: str, ending: str) -> None:
    """Make spans, start a worker by `method`, end it as `ending` says, report how long its end took."""
    with telemetry.configure(run_dir, role="fleet"):
        five("parent")
        context = multiprocessing.get_context(method)
        here, there = context.Pipe()
        worker: Any = context.Process(  # type: ignore[attr-defined]
            target=child, args=(run_dir, method, ending, there)
        )
        worker.start()
        if ending in ("term", "kill"):
            here.recv()
            if ending == "kill":
                time.sleep(1.0)
            began = time.monotonic()
            os.kill(worker.pid, signal.SIGTERM if ending == "term" else signal.SIGKILL)
        else:
            began = time.monotonic()
        worker.join(20)
        say(worker.exitcode, f"{time.monotonic() - began:.3f}")
        five("later")


def raw_fork(run_dir: str) -> None:
    """Fork by hand, with a span open, and leave by `sys.exit` on both sides."""
    telemetry.configure(run_dir)
    default_observer().opened(Work("refit", "refit:open", time.time_ns()))
    pid = os.fork()
    five("child" if pid == 0 else "parent")
    if pid:
        os.waitpid(pid, 0)


def storm(run_dir: str) -> None:
    """Fork while threads are making spans and the outbox is writing: what they hold must not stick in a child."""
    busy = threading.Event()

    def work(name: str) -> None:
        n = 0
        while not busy.is_set():
            five(f"{name}-{(n := n + 1)}-")

    with telemetry.configure(run_dir):
        threads = [threading.Thread(target=work, args=(f"busy{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        context = multiprocessing.get_context("fork")
        for _ in range(10):
            children = [context.Process(target=five, args=("child",)) for _ in range(3)]
            for each in children:
                each.start()
            for each in children:
                each.join(10)
                say(each.exitcode)
        busy.set()
        for thread in threads:
            thread.join()


def trainer(run_dir: str) -> None:
    """Open the sending, start a fleet with its headers, close."""
    with telemetry.configure(run_dir, role="trainer", run_id="join"):
        observer = default_observer()
        headers = observer.opened(Work("send_weights", "send_weights:r", time.time_ns()))
        context = multiprocessing.get_context("spawn")
        worker = context.Process(target=fleet, args=(run_dir, dict(headers)))
        worker.start()
        worker.join(30)
        observer.closed("send_weights:r", time.time_ns(), detail={"bytes": 640})


def fleet(run_dir: str, headers: dict[str, str]) -> None:
    """A fleet's side of one refit that was offered with `headers`."""
    from tests.telemetry.builders import refit_work, whole_refit

    with telemetry.configure(run_dir, role="fleet", run_id="join"):
        observer = default_observer()
        began = time.time_ns()
        observer.opened(refit_work("r", began, headers, weight_version=2))
        for each in whole_refit("r", began):
            observer.transition(each)
        observer.closed("refit:r", time.time_ns(), detail={"outcome": "committed"})


def twice(run_dir: str) -> None:
    """A second call raises, a call after the end does not, nor does either leave the first broken."""
    with telemetry.configure(run_dir):
        try:
            telemetry.configure(run_dir)
        except PitstopError as error:
            say(error.slug)
        five("first")
    five("between")
    with telemetry.configure(run_dir):
        five("second")


def own_provider(run_dir: str) -> None:
    """The program has a provider: ours is not set, its processors see our spans, the journal is added."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    from tests.telemetry.builders import Recorder

    recorder = Recorder()
    provider = TracerProvider()
    provider.add_span_processor(recorder)
    trace.set_tracer_provider(provider)
    with telemetry.configure(run_dir):
        five("a")
        say(trace.get_tracer_provider() is provider)
    say(len(recorder.ended))


def vllm_like(run_dir: str) -> None:
    """Like vLLM: sets a provider of its own too late, then emits through the global tracer under our headers."""
    import logging

    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    logging.disable(logging.WARNING)
    with telemetry.configure(run_dir, level=2, sample=1.0):
        trace.set_tracer_provider(TracerProvider())
        observer = default_observer()
        headers = observer.opened(Work("generate", "generate:q", time.time_ns()))
        tracer = trace.get_tracer("vllm.llm_engine")
        carried = TraceContextTextMapPropagator().extract(dict(headers))
        tracer.start_span("llm_request", context=carried).end()
        tracer.start_span("llm_request").end()
        observer.closed("generate:q", time.time_ns(), detail={"finish_reason": "stop"})


def killed_main(run_dir: str) -> None:
    """Die by SIGTERM with a refit open."""
    telemetry.configure(run_dir)
    default_observer().opened(Work("refit", "refit:open", time.time_ns()))
    five("a")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def stuck(run_dir: str) -> None:
    """The journal's disk hangs: neither work nor the end may wait for it."""
    from pitstop.telemetry import outbox

    class Stuck(outbox.Lines):
        def write(self, text: str) -> None:
            time.sleep(60)

    outbox.Lines = Stuck  # type: ignore[misc]
    with telemetry.configure(run_dir):
        five("a")
        time.sleep(0.7)
        before = time.monotonic()
        for n in range(200):
            five(f"b{n}")
        say(f"{time.monotonic() - before:.3f}")
        began = time.monotonic()
    say(f"{time.monotonic() - began:.3f}")


CASES: dict[str, Callable[..., None]] = {
    case.__name__: case
    for case in (parent, raw_fork, trainer, twice, own_provider, vllm_like, killed_main, stuck, storm)
}

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    Path(sys.argv[2]).mkdir(exist_ok=True)
    CASES[sys.argv[1]](*sys.argv[2:])
