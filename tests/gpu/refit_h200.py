"""A GPU engine as users have it - CUDA graphs, async scheduling - through refits of every policy. Run as a script.

    python3 tests/gpu/refit_h200.py OUT.json [--shape 0.5b]

Asserts what DESIGN guarantees and writes what it saw: phases, bubble, rates. Needs one GPU and vLLM; no network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pitstop.engine import RolloutEngine, SamplingParams

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)


def checkpoint(folder: Path, shape: str, seed: int) -> Path:
    """Write random Qwen2 weights in bf16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "use_sliding_window": False, **SHAPES[shape],
    }  # fmt: skip
    path = folder / f"{shape}-{seed}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    torch.manual_seed(seed)
    tensors = {
        name: (torch.ones(p.shape) if p.dim() == 1 and "norm" in name else torch.randn(p.shape) * 0.05).bfloat16()
        for name, p in model.named_parameters()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def launch(path: Path) -> RolloutEngine:
    return RolloutEngine.launch(
        path,
        engine_args={
            "skip_tokenizer_init": True, "max_model_len": 2048, "dtype": "bfloat16", "gpu_memory_utilization": 0.3,
            "max_num_seqs": 128, "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64]},
        },
    )  # fmt: skip


def prompt(n: int) -> list[int]:
    return [(n * 37 + k * 11) % 1000 + 10 for k in range(40)]


async def greedy(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    out: dict[int, Any] = {}
    async for n, done in engine.generate_async([prompt(n) for n in range(4)], GREEDY):
        out[n] = (list(done.token_ids), [round(x, 3) for x in done.logprobs])
    return [out[n] for n in range(4)]


def same(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Share of equal leading tokens."""
    total = equal = 0
    for (x, _), (y, _) in zip(a, b, strict=True):
        total += len(x)
        for i, j in zip(x, y, strict=True):
            if i != j:
                break
            equal += 1
    return equal / total


async def run(shape: str) -> dict[str, Any]:
    out: dict[str, Any] = {"shape": shape}
    with tempfile.TemporaryDirectory() as folder:
        t0, t1 = checkpoint(Path(folder), shape, 0), checkpoint(Path(folder), shape, 1)
        async with launch(t1) as fresh:
            wanted = await greedy(fresh)
            out["fresh_repeats_itself"] = same(await greedy(fresh), wanted)
            truth = (await fresh.fingerprints())["replica-0"]
        began = time.perf_counter()
        async with launch(t0) as engine:
            out["start_s"] = round(time.perf_counter() - began, 1)
            llm = engine.replicas[0].backend._life.llm  # type: ignore[attr-defined]
            config = llm.vllm_config
            out["async_scheduling"] = bool(config.scheduler_config.async_scheduling)
            out["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
            assert out["async_scheduling"]
            assert "NONE" not in out["cudagraph_mode"]
            before = await greedy(engine)
            first = (await engine.fingerprints())["replica-0"]
            assert first != truth
            report = await engine.refit(t1, weight_version=1)
            out["path_refit"] = _phases(report)
            out["equals_fresh"] = same(await greedy(engine), wanted)
            live = (await engine.fingerprints())["replica-0"]
            out["tensors"] = len(live)
            out["differ_from_fresh"] = [name for name in truth if live.get(name) != truth[name]]
            await engine.refit(t0, weight_version=2)
            out["back_equals_before"] = same(await greedy(engine), before)
            back = (await engine.fingerprints())["replica-0"]
            out["differ_from_before"] = [name for name in first if back.get(name) != first[name]]
            version = 2
            for policy in ("keep", "recompute", "wait", "abort"):
                version += 1
                streams = [asyncio.create_task(engine.generate(prompt(n), LONG)) for n in range(64)]
                await asyncio.sleep(1.0)
                report = await engine.refit((t0, t1)[version % 2], weight_version=version, policy=policy)
                done = await asyncio.gather(*streams)
                seen = _phases(report)
                seen["finish"] = sorted({c.finish_reason for c in done})
                seen["spans"] = sorted({len(c.spans) for c in done})
                seen["swap_at"] = sorted({c.spans[0].end for c in done})[:8]
                if policy == "recompute":
                    one = done[0]
                    swap = one.spans[0].end
                    rest = SamplingParams(max_tokens=len(one.token_ids) - swap, temperature=0.0, ignore_eos=True)
                    again = await engine.generate([*prompt(0), *one.token_ids[:swap]], rest)
                    seen["continuation_equal"] = same([(list(one.token_ids[swap:]), [])], [(list(again.token_ids), [])])
                out[policy] = seen
    return out


def _phases(report: Any) -> dict[str, Any]:
    return {
        "outcome": report.outcome.value, "nbytes": report.nbytes, "seconds": round(report.seconds, 4),
        "sent_s": round(report.sent_seconds, 4), "bubble_s": report.bubble and round(report.bubble, 4),
        **{f"{k}_s": round(v, 4) for k, v in report.phase_seconds.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.5b")
    args = parser.parse_args()
    try:
        found = asyncio.run(run(args.shape))
    except BaseException:
        args.out.write_text(json.dumps({"failed": traceback.format_exc()}))
        raise
    args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
