"""Does a refit stall the event loop? A 256 MiB refit of 2 000 tensors, from a trainer process, under live streams.

A ticker on the engine's loop wakes every millisecond and notes how late it was: first with streams alone, then through
refits. Prints one JSON object with p50, p99 and the maximum of both, in milliseconds. Budget (G9): p99 under 20 ms,
at most 100 ms.

    python benchmarks/loop_lag.py [--mib 256] [--tensors 2000] [--refits 5] [--streams 32]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines import wide_checkpoint
from pitstop.engine import RolloutEngine, SamplingParams


def trainer(link: Connection, address: str, path: str) -> None:
    import torch
    from safetensors.torch import load_file

    from pitstop.transports import Publisher

    torch.set_num_threads(1)
    tensors = load_file(f"{path}/model.safetensors")
    with Publisher.connect(address) as publisher:
        link.send("ready")
        while (version := link.recv()) is not None:
            report = publisher.publish(tensors, weight_version=version).result(timeout=120)
            link.send((report.nbytes, report.seconds, dict(report.phase_seconds)))


async def ticks(late: list[float], stop: asyncio.Event) -> None:
    while not stop.is_set():
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - due) * 1e3)


async def watched(work: Any) -> tuple[dict[str, float], Any]:
    late: list[float] = []
    stop = asyncio.Event()
    ticker = asyncio.create_task(ticks(late, stop))
    result = await work
    stop.set()
    await ticker
    late.sort()
    picked = {"p50": late[len(late) // 2], "p99": late[int(len(late) * 0.99)], "max": late[-1], "ticks": len(late)}
    return {k: round(v, 3) for k, v in picked.items()}, result


async def endless(engine: RolloutEngine, n: int) -> None:
    while True:
        async for _ in engine.stream([n, 1, 2], SamplingParams(max_tokens=200, ignore_eos=True)):
            pass


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--refits", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model, count = wide_checkpoint(Path(folder), args.mib, args.tensors)
        engine_args = {
            "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20,
        }  # fmt: skip
        # Spawned, as users have it: the frontend shares its two cores with the engine core and the trainer.
        async with RolloutEngine.launch(model, engine_args=engine_args) as engine:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=trainer, args=(theirs, engine.address, model), daemon=True)
            process.start()
            await asyncio.to_thread(ours.recv)
            streams = [asyncio.create_task(endless(engine, n)) for n in range(args.streams)]
            await asyncio.sleep(3)
            idle, _ = await watched(asyncio.sleep(5))

            async def refits() -> list[Any]:
                out = []
                for version in range(1, args.refits + 1):
                    ours.send(version)
                    out.append(await asyncio.to_thread(ours.recv))
                return out

            during, reports = await watched(refits())
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            ours.send(None)
            await asyncio.to_thread(process.join, 10)
    nbytes, seconds, phases = reports[-1]
    out = {
        "benchmark": "loop_lag", "bytes": nbytes, "tensors": count, "streams": args.streams,
        "lag_ms_streams_only": idle, "lag_ms_during_refits": during,
        "last_refit_s": round(seconds, 3), "phases_s": {k: round(v, 4) for k, v in phases.items()},
    }  # fmt: skip
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
