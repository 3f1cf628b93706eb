"""What a user runs: one engine started as vLLM starts them. Says what it has, then waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys

from pitstop.engine.request import Request, SamplingParams
from pitstop.engine.vllm_backend import VllmBackend


async def main(model: str) -> None:
    engine_args = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "enforce_eager": True}
    backend = VllmBackend(model, engine_args=engine_args)
    booted = await backend.start("replica-0", 1)
    leg = await backend.submit(
        Request(
            request_id="r0", prompt_token_ids=(256, *range(64, 84)), max_tokens=24, cache_salt="w0", deltas=False,
            text=False, params=SamplingParams(temperature=0.0, ignore_eos=True),
        )
    )  # fmt: skip
    made = await leg.next()
    sys.stdout.write(json.dumps({"ranks": len(booted.layout), "made": list(made.token_ids)}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
