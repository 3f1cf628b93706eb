"""What does telemetry cost the thread that runs the engine, and the machine?

    python benchmarks/telemetry_cost.py [--rounds 9]

Per case, in microseconds: `caller` is CPU time of the calling thread, `total` that of the whole process, the outbox's
thread and the files that it writes included. Cases are measured in turn, round after round; printed are the median
of all rounds and their range. `nothing` is the observer that sees nothing: what the calls themselves cost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import median

from pitstop import telemetry
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import NullObserver, Observer, Scalar, Transition, Work, default_observer

P = Phase
REFIT = (
    (P.SERVING, "RefitOffered", P.SUSPENDING),
    (P.SUSPENDING, "Suspended", P.RECEIVING),
    (P.RECEIVING, "WeightsLanded", P.FINALIZING),
    (P.FINALIZING, "Finalized", P.RESUMING),
    (P.RESUMING, "Resumed", P.SERVING),
)
DETAIL: dict[str, Scalar] = {
    "flights": 12,
    "policy": "recompute",
    "live": 12,
    "released": 12,
    "bytes": 1 << 30,
    "tensors": 300,
}
ASKED: dict[str, Scalar] = {"prompt_tokens": 512, "max_tokens": 1024, "temperature": 1.0, "top_p": 1.0, "stream": True}
GOT: dict[str, Scalar] = {
    "finish_reason": "stop", "output_tokens": 700, "holds": 0, "segments": 1, "replica": "replica-0",
    "version_first": 3, "version_last": 3, "first_token_at": time.time_ns(), "cached_tokens": 0,
}  # fmt: skip
SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def transitions(observer: Observer, count: int) -> None:
    for n in range(count // 5):
        refit = str(n)
        observer.opened(Work("refit", f"refit:{refit}", time.time_ns(), detail={"transport": "shared_memory"}))
        for before, event, after in REFIT:
            observer.transition(
                Transition("replica-0", 1, before, event, after, time.time_ns(), refit, n, None, DETAIL)
            )
        observer.closed(f"refit:{refit}", time.time_ns(), None, {"outcome": "committed", "replicas": 1})


def requests(headers: Mapping[str, str]) -> Callable[[Observer, int], None]:
    def run(observer: Observer, count: int) -> None:
        for n in range(count):
            key = f"generate:{n}"
            observer.opened(Work("generate", key, time.time_ns(), headers=headers, detail=ASKED))
            observer.closed(key, time.time_ns(), None, GOT)

    return run


CASES: dict[str, Callable[[Observer, int], None]] = {
    "transition": transitions,
    "request, not sampled": requests({"traceparent": SAMPLED["traceparent"][:-1] + "0"}),
    "request, sampled": requests(SAMPLED),
}


def measure(
    case: Callable[[Observer, int], None], observer: Observer, count: int, flush: Callable[[], object]
) -> tuple[float, float]:
    flush()
    process, thread = time.process_time(), time.thread_time()
    case(observer, count)
    thread = time.thread_time() - thread
    flush()
    return thread / count * 1e6, (time.process_time() - process) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=2_000)
    options = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in CASES}
    with tempfile.TemporaryDirectory() as folder, telemetry.configure(folder, level=2, sample=0.0) as on:
        observers: dict[str, tuple[Observer, Callable[[], object]]] = {
            "nothing": (NullObserver(), lambda: None),
            "telemetry": (default_observer(), on.flush),
        }
        for number in range(options.rounds + 1):
            for name, case in CASES.items():
                for who, (observer, flush) in observers.items():
                    figures = measure(case, observer, options.count, flush)
                    if number:  # the first round warms up
                        found[name].setdefault(who, []).append(figures)
        written = sum(os.path.getsize(os.path.join(folder, file)) for file in os.listdir(folder))
    results = {
        name: {
            who: {
                what: {"median": round(median(column), 2), "range": [round(min(column), 2), round(max(column), 2)]}
                for what, column in zip(("caller", "total"), zip(*rounds, strict=True), strict=True)
            }
            for who, rounds in by_observer.items()
        }
        for name, by_observer in found.items()
    }
    json.dump(
        {
            "benchmark": "telemetry_cost", "unit": "us", "rounds": options.rounds, "count": options.count,
            "python": platform.python_version(), "cpus": os.cpu_count(), "journal_bytes": written, "results": results,
        },
        sys.stdout, indent=2,
    )  # fmt: skip
    print()


if __name__ == "__main__":
    main()
