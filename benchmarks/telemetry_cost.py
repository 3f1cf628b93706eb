"""What does telemetry cost the thread that runs the engine, and the machine, and does a collector's fault cost a refit?

    python benchmarks/telemetry_cost.py [--rounds 9] [--refits 20]

Per case, in microseconds: `caller` is CPU time of the calling thread, `total` that of the whole process, the outbox's
thread and the files that it writes included. Cases are measured in turn, round after round; printed are the median
of all rounds and their range. `nothing` is the observer that sees nothing: what the calls themselves cost.

`refits`: wall milliseconds of one refit of two simulated replicas under streams (a step takes 2 ms, a call to a replica
5), with tracing off and with level 1 and each kind of collector on loopback, round after round in a new order. `ms` is
the lower quartile of all refits (what else runs on the machine only ever adds), `ratio` divides it by that with tracing
off, `beside_journal` by that with journals and no collector; `range` is the ratio's, taken round by round. `end` is how
many seconds turning telemetry off took at most. `off again` is the noise of the method: off against off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pitstop import telemetry
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import NullObserver, Observer, Scalar, Transition, Work, default_observer
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import Delays, SimulatedBackend
from tests.engine.sim import SimFleet
from tests.telemetry.collectors import Reply, dead, running, slow

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


async def refit_times(refits: int, observer: Observer) -> list[float]:
    """Wall milliseconds of each refit, from the offer to the last replica."""
    found = []
    engines = [SimulatedBackend(delays=Delays(step=0.002, call=0.005)) for _ in range(2)]
    async with SimFleet(engines, observer) as fleet:

        async def stream(n: int) -> None:
            while True:
                await fleet.generate([n], SamplingParams(max_tokens=20))

        streams = [asyncio.create_task(stream(n)) for n in range(8)]
        await asyncio.sleep(0.05)
        for version in range(1, refits + 1):
            began = time.perf_counter()
            await fleet.refit_to(version)
            found.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.005)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found


def serve(pipe: Connection) -> None:
    """A process of collectors, so that what they cost is not counted as ours."""
    with running() as healthy, slow() as mute, running(lambda path: Reply(500)) as lying:
        pipe.send({"healthy": healthy.url, "slow": mute.url, "lying (500)": lying.url})
        pipe.recv()


def refits_by_collector(rounds: int, refits: int) -> dict[str, Any]:
    times: dict[str, list[list[float]]] = {}
    shuffled = random.Random(7)
    ends: dict[str, float] = {}
    logging.getLogger("pitstop.telemetry").setLevel(logging.ERROR)
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    with dead() as nowhere:
        urls = {"journal only": None, "dead": nowhere, **here.recv()}
        kinds = ["off", "off again", *urls]
        for number in range(rounds + 1):
            for name in shuffled.sample(kinds, len(kinds)):
                end = 0.0
                if name not in urls:
                    measured = asyncio.run(refit_times(refits, NullObserver()))
                else:
                    with tempfile.TemporaryDirectory() as folder:
                        on = telemetry.configure(folder, endpoint=urls[name])
                        measured = asyncio.run(refit_times(refits, default_observer()))
                        end = time.perf_counter()
                        on.close()
                        end = time.perf_counter() - end
                if number:  # the first round warms up
                    times.setdefault(name, []).append(measured)
                    ends[name] = max(ends.get(name, 0.0), end)
    here.send("enough")
    server.join()
    pooled = {name: quartile([value for measured in times[name] for value in measured]) for name in kinds}
    return {
        name: {
            "ms": round(pooled[name], 3),
            "ratio": round(pooled[name] / pooled["off"], 4),
            "range": [round(pick(map(ratio, times[name], times["off"])), 4) for pick in (min, max)],
            "beside_journal": round(pooled[name] / pooled["journal only"], 4),
            "end": round(ends[name], 3),
        }
        for name in kinds
    }


def quartile(values: list[float]) -> float:
    return quantiles(values, n=4)[0]


def ratio(these: list[float], those: list[float]) -> float:
    return quartile(these) / quartile(those)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--refits", type=int, default=20, help="per round and kind of collector")
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
            "refits": refits_by_collector(options.rounds, options.refits),
        },
        sys.stdout, indent=2,
    )  # fmt: skip
    print()


if __name__ == "__main__":
    main()
