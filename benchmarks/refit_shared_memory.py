"""How fast a version goes through shared memory, as a ratio of a single-thread memcpy of the same bytes.

    python benchmarks/refit_shared_memory.py --gib 1 --pairs 9 > result.json

Every figure is the median, over interleaved pairs, of (memcpy seconds / method seconds): 1.0 is as fast as memcpy.
`load` goes from the segment into the receiver's own tensors, proving every byte on the way; `pack` from the trainer's
tensors into the segment, digesting on the way; `pack_and_load` is both, one after the other. `prove` is the load
half as a worker does it before it hands views of the segment over. `refit` is three processes and the control link:
from `publish` to the last byte proven in the worker, with one core a process where the machine has them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from pitstop.engine.refit import Outcome, RefitReport, route
from pitstop.engine.worker_ports import Bucket, Inventory, Placed, TensorSpec, Ticket, WorkerLayout
from pitstop.transports import Publisher
from pitstop.transports.buckets import place
from pitstop.transports.control import ControlLink
from pitstop.transports.digest import COPY, Work, prepare
from pitstop.transports.packing import Proof, Slot
from pitstop.transports.remote import RemoteSending
from pitstop.transports.ring_receiver import RingReceiver
from pitstop.transports.room import Buffers
from pitstop.transports.segment import Mapping, Segment
from pitstop.transports.shared_memory import SegmentReceiver, SharedMemoryTransport
from pitstop.transports.sources import TensorSource

BUDGET = {"load": 0.85, "pack_and_load": 0.40, "ring": 0.65}


def model(nbytes: int, count: int, dtype: str = "bfloat16") -> list[tuple[str, torch.Tensor]]:
    element: torch.dtype = getattr(torch, dtype)
    each = nbytes // count // element.itemsize
    # One block, as a trainer's allocator would have it, filled with something that compresses badly.
    block = torch.empty(each * count, dtype=element)
    block.view(torch.int16).random_(0, 30000)
    return [(f"layer.{n}.weight", block[n * each : (n + 1) * each]) for n in range(count)]


class Shared:
    """A segment with its two mappings and the receiver's own tensors, all touched before anything is timed."""

    def __init__(self, named: list[tuple[str, torch.Tensor]], wire: str = "bfloat16") -> None:
        self.source = TensorSource(named)
        specs = [TensorSpec(s.name, wire, s.shape) for s in self.source.specs()]
        self.placed, nbytes = place(specs)
        self.segment = Segment(nbytes)
        self.write = Mapping(self.segment.path, nbytes, "write")
        self.read = Mapping(self.segment.path, nbytes, "read")
        self.slots = [Slot(n, wire, p.offset) for n, p in enumerate(self.placed)]
        self.digests = np.zeros(len(specs), np.uint64)
        self.own = [torch.zeros(p.spec.shape, dtype=getattr(torch, wire)) for p in self.placed]
        self.proof = Proof(self.placed, self.read)
        self._load = self._loading(self.placed)

    def pack(self) -> None:
        for _ in self.source.pack(self.slots, self.write, self.digests):
            pass

    def prove(self) -> None:
        for _ in self.proof.differing(self.digests.tolist()):
            pass

    def load(self) -> None:
        for _ in self._load:
            pass
        if not np.array_equal(self._load.digests, self.digests):
            raise AssertionError("what was loaded is not what was packed")

    def pack_and_load(self) -> None:
        self.pack()
        self.load()

    def check(self) -> None:
        self.pack_and_load()
        for (spec, sent), own in zip(self.source.tensors(), self.own, strict=True):
            if not torch.equal(sent.to(own.dtype).view(torch.int16), own.view(torch.int16)):
                raise AssertionError(f"{spec.name} differs")

    def _loading(self, placed: tuple[Placed, ...]) -> Work:
        width = np.array([2 for _ in placed])
        source = np.array([self.read.address + p.offset for p in placed], np.uint64)
        target = np.array([t.data_ptr() for t in self.own], np.uint64)
        return Work(COPY, width, source, target, np.array([t.numel() for t in self.own]))


def timed(method: Callable[[], object]) -> float:
    began = time.perf_counter()
    method()
    return time.perf_counter() - began


def compare(nbytes: int, pairs: int) -> dict[str, Any]:
    """Interleave every method with a memcpy of the same bytes."""
    source, target = np.full(nbytes, 1, np.uint8), np.zeros(nbytes, np.uint8)
    methods: dict[str, Callable[[], object]] = {}
    for count in (300, 10_000):
        shared = Shared(model(nbytes, count))
        shared.check()
        methods |= {
            f"load_{count}": shared.load,
            f"prove_{count}": shared.prove,
            f"pack_{count}": shared.pack,
            f"pack_and_load_{count}": shared.pack_and_load,
        }
    cast = Shared(model(nbytes, 300, "float32"))
    cast.check()
    methods["pack_cast_300"] = cast.pack
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *methods)}
    for _ in range(pairs):
        for name, method in methods.items():
            plain, ours = timed(lambda: np.copyto(target, source)), timed(method)
            ratios[name].append(plain / ours)
            seconds["memcpy"].append(plain)
            seconds[name].append(ours)
    return {
        "ratio_to_memcpy": {name: spread(values) for name, values in ratios.items()},
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "memcpy_gb_per_s": round(nbytes / statistics.median(seconds["memcpy"]) / 1e9, 2),
        "small_to_large": {
            half: round(statistics.median(seconds[f"{half}_10000"]) / statistics.median(seconds[f"{half}_300"]), 3)
            for half in ("load", "pack", "pack_and_load")
        },
    }


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4), "least": round(ordered[0], 4), "most": round(ordered[-1], 4)
    }  # fmt: skip


# -- three processes -----------------------------------------------------------------------------------------


class Sink:
    def landed(self, bucket: Bucket) -> None:
        self.bucket: Bucket | None = bucket

    def apply(self) -> None: ...

    def finalize(self) -> None: ...

    def undo(self) -> None: ...

    def release(self) -> None:
        self.bucket = None


def worker(pipe: Connection) -> None:
    prepare().result()
    sink = Sink()
    while (ticket := pipe.recv()) is not None:
        known = msgspec.msgpack.decode(ticket, type=Ticket)
        receiver = (RingReceiver if known.slots else SegmentReceiver)(known)
        thread = threading.Thread(target=receiver.run, args=(sink,))
        thread.start()
        pipe.send(None)
        pipe.recv()
        thread.join()
        sink.release()
        receiver.close()
        pipe.send(None)


def trainer(pipe: Connection, address: str, nbytes: int, count: int) -> None:
    prepare().result()
    named = model(nbytes, count)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    pipe.send(None)
    with Publisher.connect(address) as publisher:
        while (version := pipe.recv()) is not None:
            pipe.send(timed(lambda: target.copy_(source)))
            pipe.recv()
            publisher.publish(iter(named), weight_version=version).result(120)
            pipe.send(None)


async def refit(nbytes: int, count: int, rounds: int, buffers: Buffers) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        offers: asyncio.Queue[RemoteSending] = asyncio.Queue()
        link = ControlLink(f"ipc://{folder}/control.sock", run_id="benchmark", on_offer=offers.put_nowait)
        transport = SharedMemoryTransport(link, buffers)
        serving = asyncio.create_task(link.run())
        await link.ready()
        ours, theirs = spawn.Pipe()
        to_worker, in_worker = spawn.Pipe()
        children = [
            spawn.Process(target=trainer, args=(theirs, link.address, nbytes, count), daemon=True),
            spawn.Process(target=worker, args=(in_worker,), daemon=True),
        ]
        for child in children:
            child.start()
        await asyncio.to_thread(ours.recv)
        ratios, lags = [], []
        for version in range(1, rounds + 2):
            ours.send(version)
            plain = await asyncio.to_thread(ours.recv)
            ours.send("go")
            began = time.perf_counter()
            with watching() as worst:
                took = await one(transport, await offers.get(), to_worker, began)
            await asyncio.to_thread(ours.recv)
            if version > 1:  # the first refit pays for the pages
                ratios.append(plain / took)
                lags.append(worst[0])
        ours.send(None)
        to_worker.send(None)
        for child in children:
            child.join(10)
        serving.cancel()
        await asyncio.wait({serving})
    return {"ratio_to_memcpy": spread(ratios), "event_loop_lag_s": spread(lags)}


async def one(transport: SharedMemoryTransport, sending: RemoteSending, pipe: Connection, began: float) -> float:
    offer = sending.offer
    manifest = await asyncio.to_thread(route, offer, Inventory(offer.tensors))
    layout = WorkerLayout("r0", 1, 0, 1, 0, "cpu")
    tickets = await transport.plan(offer, manifest, [layout], (120.0, 5.0))
    await asyncio.to_thread(lambda: pipe.send(msgspec.msgpack.encode(tickets[0])))
    await asyncio.to_thread(pipe.recv)
    progresses = transport.watch(offer.refit_id)
    if (ring := transport.ring(offer.refit_id)) is not None and (await anext(progresses)).kind != "attached":
        raise AssertionError("the receiver did not come")
    await transport.seal(await sending.send(manifest, tickets, ring))
    async for progress in progresses:
        if progress.kind == "failed":
            raise AssertionError(progress.error)
        if progress.kind == "landed":
            break
    took = time.perf_counter() - began
    pipe.send("release")
    await asyncio.to_thread(pipe.recv)
    await transport.release(offer.refit_id)
    await sending.settled(
        RefitReport(
            offer.refit_id, offer.weight_version, Outcome.COMMITTED, "shared_memory", offer.nbytes, len(offer.tensors),
            took, took,
        )
    )  # fmt: skip
    return took


@contextlib.contextmanager
def watching() -> Iterator[list[float]]:
    """Measure how late a task that wants to run every millisecond is, at worst."""
    worst = [0.0]

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            worst[0] = max(worst[0], time.perf_counter() - due)

    task = asyncio.create_task(tick())
    try:
        yield worst
    finally:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the version")
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of each comparison")
    arguments = parser.parse_args()
    nbytes = int(arguments.gib * (1 << 30))
    torch.set_num_threads(1)
    prepare().result()
    halves = compare(nbytes, arguments.pairs)
    ways = {"segment": Buffers()} | {
        f"ring_{slots}x{mib}MiB": Buffers(most_nbytes=0, slots=slots, slot_nbytes=mib << 20)
        for slots, mib in ((2, 4), (8, 4), (4, 16), (4, 64))
    }
    whole = {
        f"{way}_{n}": asyncio.run(refit(nbytes, n, arguments.pairs, buffers))
        for way, buffers in ways.items()
        for n in (300, 10_000)
    }
    print(
        json.dumps(
            {
                "question": "refit through shared memory, against memcpy",
                "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
                "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
                "bytes": nbytes,
                "pairs": arguments.pairs,
                "budget": BUDGET,
                **halves,
                "refit": whole,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
