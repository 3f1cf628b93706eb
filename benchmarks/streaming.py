"""Does going through Pitstop cost tokens? `generate_async` and `stream` against bare AsyncLLM on one engine.

Both sides use the same live engine in turn, with the same prompts, lengths and sampling; pairs are interleaved and
their order alternates. Prints one JSON object: for each number of streams and mode the median ratio of nine pairs
(ours / peer, tokens per second), its spread, and both medians. Budgets: DESIGN 10.

    python benchmarks/streaming.py [--model DIR] [--streams 1 64 256] [--pairs 9] [--tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines import fast_engine, tiny_checkpoint
from pitstop.engine import RolloutEngine, SamplingParams

Side = Callable[[list[list[int]], int], Awaitable[int]]


def ours_final(engine: RolloutEngine) -> Side:
    async def run(prompts: list[list[int]], tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        return sum([len(c.token_ids) async for _, c in engine.generate_async(prompts, params)])

    return run


def ours_stream(engine: RolloutEngine) -> Side:
    async def one(prompt: list[int], params: SamplingParams) -> int:
        return sum([len(chunk.token_ids) async for chunk in engine.stream(prompt, params)])

    async def run(prompts: list[list[int]], tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        return sum(await asyncio.gather(*(one(p, params) for p in prompts)))

    return run


def peer(llm: Any, *, delta: bool) -> Side:
    """Bare AsyncLLM as its users run it: one task a request over `generate`, sampled-token logprobs."""
    from vllm import SamplingParams as VllmParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY

    async def one(prompt: list[int], tokens: int) -> int:
        params = VllmParams(
            max_tokens=tokens, temperature=1.0, ignore_eos=True, logprobs=0, output_kind=kind, detokenize=delta
        )
        made = 0
        async for output in llm.generate(tokens_input(prompt), params, uuid.uuid4().hex):
            made += len(output.outputs[0].token_ids)
        return made

    async def run(prompts: list[list[int]], tokens: int) -> int:
        return sum(await asyncio.gather(*(one(p, tokens) for p in prompts)))

    return run


async def rate(side: Side, streams: int, tokens: int, seed: int) -> float:
    # Fresh prompts each time: a prefix cache would favour whoever comes second.
    prompts = [[(seed * 31 + n * 7 + k) % 250 for k in range(16)] for n in range(streams)]
    began = time.perf_counter()
    made = await side(prompts, tokens)
    assert made == streams * tokens, (made, streams, tokens)
    return made / (time.perf_counter() - began)


async def compare(ours: Side, theirs: Side, streams: int, tokens: int, pairs: int) -> dict[str, float]:
    ratios: list[float] = []
    mine: list[float] = []
    other: list[float] = []
    await rate(ours, streams, tokens, 1)
    await rate(theirs, streams, tokens, 2)
    for n in range(pairs):
        order = [(ours, mine), (theirs, other)]
        for side, rates in order if n % 2 else order[::-1]:
            rates.append(await rate(side, streams, tokens, 10 + n * 2 + (side is ours)))
        ratios.append(mine[-1] / other[-1])
    return {
        "ratio": round(median(ratios), 4), "low": round(min(ratios), 4), "high": round(max(ratios), 4),
        "ours_tok_s": round(median(mine), 1), "peer_tok_s": round(median(other), 1),
    }  # fmt: skip


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or tiny_checkpoint(Path(folder))
        async with fast_engine(model, max_model_len=512, max_num_seqs=512) as engine:
            llm = engine.replicas[0].backend._life.llm  # type: ignore[attr-defined]
            out: dict[str, Any] = {"benchmark": "streaming", "tokens": args.tokens, "pairs": args.pairs}
            for streams in args.streams:
                out[f"generate_async_{streams}"] = await compare(
                    ours_final(engine), peer(llm, delta=False), streams, args.tokens, args.pairs
                )
                out[f"stream_{streams}"] = await compare(
                    ours_stream(engine), peer(llm, delta=True), streams, args.tokens, args.pairs
                )
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
