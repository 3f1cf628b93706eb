"""A user's program that runs an engine, spawned as users have it, and says when it is up."""

from __future__ import annotations

import asyncio
import signal
import sys

from pitstop.engine import RolloutEngine, SamplingParams


async def main(model: str) -> None:
    engine_args = {
        "max_model_len": 256, "dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "enforce_eager": True,
    }  # fmt: skip
    async with RolloutEngine.launch(model, engine_args=engine_args) as engine:
        await engine.generate([97], SamplingParams(max_tokens=2))
        sys.stdout.write(f"up {engine.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    # A shell starts what it puts into the background with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main(sys.argv[1]))
