"""Load plans on a GPU: a dense model and a small mixture of experts, with CUDA graphs, FP8 KV cache off and on.

    python3 tests/gpu/plan_h200.py OUT.json [--families dense,moe] [--caches auto,fp8]

Every version, staged and in place, must leave parameters and buffers bit-equal to a fresh load's; from the second on
what the plan covers must have been copied, in place right where it was received. Writes what each phase took. Needs
one GPU and vLLM; no network.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pitstop.engine import RolloutEngine
from pitstop.engine.ports import NullObserver, Transition
from pitstop.engine.worker_ports import WorkerOp
from tests.gpu.ipc_h200 import Child, launch, recorded, said
from tests.gpu.refit_h200 import checkpoint, greedy, same

MOE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "num_experts": 64,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
# Not by profiling: the families may be run side by side on one GPU.
CACHE = 8 << 30


def experts(folder: Path, seed: int) -> Path:
    """Write a random Qwen3 mixture of experts in bf16, one tensor an expert's projection."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "use_sliding_window": False, "attention_bias": False, **MOE,
    }  # fmt: skip
    path = folder / f"moe-{seed}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    width, head = MOE["hidden_size"], MOE["head_dim"]
    queries, keys = (MOE[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    inner = MOE["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("model.embed_tokens", "lm_head"):
        shapes[f"{name}.weight"] = (MOE["vocab_size"], width)
    for n in range(MOE["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (rows, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, queries)
        for part in ("q", "k"):
            shapes[f"{layer}.self_attn.{part}_norm.weight"] = (head,)
        for part in ("input", "post_attention"):
            shapes[f"{layer}.{part}_layernorm.weight"] = (width,)
        shapes[f"{layer}.mlp.gate.weight"] = (MOE["num_experts"], width)
        for e in range(MOE["num_experts"]):
            for part in ("gate", "up"):
                shapes[f"{layer}.mlp.experts.{e}.{part}_proj.weight"] = (inner, width)
            shapes[f"{layer}.mlp.experts.{e}.down_proj.weight"] = (width, inner)
    shapes["model.norm.weight"] = (width,)
    torch.manual_seed(seed)
    tensors = {
        name: (torch.randn(shape) * 0.05 + (len(shape) == 1)).bfloat16().contiguous() for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


async def ways(engine: RolloutEngine) -> dict[str, int]:
    """Count the tensors by the way that they will go."""
    backend, inventory = engine.replicas[0].backend, engine.replicas[0].booted.inventory  # type: ignore[union-attr]
    (reply,) = await backend.call_workers(WorkerOp("ways", tensors=inventory.tensors))
    found: dict[str, int] = {}
    for way in (reply.way_of or {}).values():
        found[way] = found.get(way, 0) + 1
    return found


class Loads(NullObserver):
    """How the last version got into the parameters."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def transition(self, change: Transition) -> None:
        if "copied" in change.detail:
            keys = ("copied", "straight", "reloaded", "why_reloaded")
            self.last = {key: change.detail[key] for key in keys}


async def family(name: str, caches: list[str], out: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        t0, t1 = (checkpoint(folder, "0.5b", s) if name == "dense" else experts(folder, s) for s in (0, 1))
        truths = []
        for path in (t0, t1):
            async with launch(path, enforce_eager=True, kv_cache_memory_bytes=CACHE) as fresh:
                truths.append((await fresh.fingerprints())["replica-0"])
        said(name, "truths known")
        for cache in caches:
            seen: dict[str, Any] = {}
            out[f"{name}_{cache}"] = seen
            loads = Loads()
            async with launch(t0, kv_cache_dtype=cache, kv_cache_memory_bytes=CACHE, observer=loads) as engine:
                config = engine.replicas[0].backend._life.llm.vllm_config  # type: ignore[attr-defined]
                seen["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
                assert "NONE" not in seen["cudagraph_mode"]
                before = await greedy(engine)
                trainer = Child(engine.address, [t0, t1])
                assert await trainer.answer() == "ready"
                for version in range(1, 9):
                    which, mode = version % 2, ("staged", "in_place")[version // 2 % 2]
                    told = await trainer.ask("publish", which, version, {"mode": mode})
                    assert told.get("outcome") == "committed", told
                    live, right = (await engine.fingerprints())["replica-0"], truths[which]
                    told["differ"] = [n for n in right if live.get(n) != right[n]][:5]
                    told["loads"] = dict(loads.last)
                    seen[f"{version}_{mode}"] = told
                    if version > 1:
                        assert told["loads"]["copied"], told
                        assert bool(told["loads"]["straight"]) is (mode == "in_place"), told
                    assert not told["differ"], told
                    seen["ways"] = await ways(engine)
                seen["tokens_come_back"] = same(await greedy(engine), before)
                assert seen["ways"].get("copied", 0) > 0, seen["ways"]
                trainer.pipe.send(None)
            said(name, cache, seen["ways"])


async def run(families: list[str], caches: list[str], out: dict[str, Any]) -> None:
    for name in families:
        await family(name, caches, out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", default="dense,moe")
    parser.add_argument("--caches", default="auto,fp8")
    args = parser.parse_args()
    out: dict[str, Any] = {}
    recorded(run(args.families.split(","), args.caches.split(","), out), args.out, out)


if __name__ == "__main__":
    main()
