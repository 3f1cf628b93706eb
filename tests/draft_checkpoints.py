"""Tiny checkpoints with drafters: a Llama and its Eagle3 drafter, and a mixture of experts with an MTP layer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import checkpoints
from tests.checkpoints import EXPERTS, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB

if TYPE_CHECKING:
    from torch import Tensor

DRAFT_VOCAB = 256
LATENT, ROPE = 512, 64  # the only ones that the CPU's kernel knows
MTP_LAYER = f"model.layers.{LAYERS}."


def _content(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    import torch

    chance = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=chance)
        if name.endswith("e_score_correction_bias"):
            made[name] = 0.01 * noise
        elif len(shape) == 1:
            made[name] = 1.0 + 0.1 * noise
        elif "embed_tokens" in name or "head" in name:
            made[name] = 0.5 * noise
        else:
            made[name] = noise * 2.0 / math.sqrt(shape[-1])
    return made


def _attention(layer: str, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }


def _mlp(layer: str, inner: int = INNER) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.gate_proj.weight": (inner, HIDDEN),
        f"{layer}.up_proj.weight": (inner, HIDDEN),
        f"{layer}.down_proj.weight": (HIDDEN, inner),
    }


def eagle3_tensors(seed: int) -> dict[str, Tensor]:
    """Return an Eagle3 drafter's weights, with a smaller vocabulary of its own."""
    import torch

    made = _content(
        {
            "fc.weight": (HIDDEN, 2 * HIDDEN),
            "midlayer.hidden_norm.weight": (HIDDEN,),
            "midlayer.input_layernorm.weight": (HIDDEN,),
            **_attention("midlayer", 2 * HIDDEN),
            "midlayer.post_attention_layernorm.weight": (HIDDEN,),
            **_mlp("midlayer.mlp"),
            "norm.weight": (HIDDEN,),
            "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        },
        100 + seed,
    )
    offsets = torch.zeros(DRAFT_VOCAB, dtype=torch.int64)
    offsets[DRAFT_VOCAB // 2 :] = VOCAB - DRAFT_VOCAB - seed
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[torch.arange(DRAFT_VOCAB) + offsets] = True
    return {**made, "d2t": offsets, "t2d": known}


def write_eagle3(folder: Path, seed: int) -> Path:
    """Write an Eagle3 drafter of the family `llama`."""
    return write(folder, eagle3_config(), eagle3_tensors(seed))


def eagle3_config() -> dict[str, Any]:
    return {
        **checkpoints.config("llama"), "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }  # fmt: skip


def _mla(layer: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_proj.weight": (HEADS * (HEAD_DIM + ROPE), HIDDEN),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROPE, HIDDEN),
        f"{layer}.self_attn.kv_a_layernorm.weight": (LATENT,),
        f"{layer}.self_attn.kv_b_proj.weight": (2 * HEADS * HEAD_DIM, LATENT),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }


def mtp_tensors(seed: int, *, latent: bool = False, behind: int = 1) -> dict[str, Tensor]:
    """Return a mixture of experts' weights, the last layers of which are its MTP drafter's. `latent`: DeepSeek's."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for n in range(LAYERS + behind):
        layer = f"model.layers.{n}"
        if n >= LAYERS:
            shapes |= {
                f"{layer}.enorm.weight": (HIDDEN,),
                f"{layer}.hnorm.weight": (HIDDEN,),
                f"{layer}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
                f"{layer}.shared_head.norm.weight": (HIDDEN,),
            }
        shapes |= _mla(layer) if latent else _attention(layer, HIDDEN)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
        if n == 0:
            shapes |= _mlp(f"{layer}.mlp")
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        for expert in range(EXPERTS):
            shapes |= _mlp(f"{layer}.mlp.experts.{expert}")
        shapes |= _mlp(f"{layer}.mlp.shared_experts")
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    made = _content(shapes, 200 + seed)
    # As published checkpoints do.
    made[f"{MTP_LAYER}embed_tokens.weight"] = made["model.embed_tokens.weight"].clone()
    made[f"{MTP_LAYER}shared_head.head.weight"] = made["lm_head.weight"].clone()
    return made


def mtp_config(*, latent: bool = False, behind: int = 1) -> dict[str, Any]:
    own: dict[str, Any] = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    if latent:
        own = {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": HEADS,
            "q_lora_rank": None, "kv_lora_rank": LATENT, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": ROPE,
            "v_head_dim": HEAD_DIM, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
        }  # fmt: skip
    common = {name: value for name, value in checkpoints.config("llama").items() if not latent or name != "head_dim"}
    return {
        **common, **own,
        "first_k_dense_replace": 1, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_qk_norm": False, "num_nextn_predict_layers": behind,
    }  # fmt: skip


def mimo_tensors(seed: int) -> dict[str, Tensor]:
    """Return a dense model's weights, with a drafter's behind its layers under another name."""
    layer = "model.mtp_layers.0"
    bias = {f"{layer}.self_attn.{part}_proj.bias": (rows * HEAD_DIM,) for part, rows in
            (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}  # fmt: skip
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    behind = {
        f"{layer}.input_proj.weight": (HIDDEN, 2 * HIDDEN),
        **{f"{layer}.{norm}.weight": (HIDDEN,) for norm in norms},
        **_attention(layer, HIDDEN),
        **bias,
        **_mlp(f"{layer}.mlp"),
    }
    return checkpoints.tensors("qwen2", seed) | _content(behind, 300 + seed)


def mimo_config() -> dict[str, Any]:
    return {**checkpoints.config("qwen2"), "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def write_mtp(folder: Path, seed: int, *, shards: int = 1) -> Path:
    """Write a checkpoint with an MTP layer."""
    return write(folder, mtp_config(), mtp_tensors(seed), shards)


def write(folder: Path, config: dict[str, Any], content: dict[str, Tensor], shards: int = 1) -> Path:
    """Write a checkpoint into `folder` and return it."""
    from safetensors.torch import save_file

    checkpoints.write(folder, "llama", 0)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    if shards == 1:
        save_file(content, folder / "model.safetensors")
        return folder
    where: dict[str, str] = {}
    names = list(content)
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: content[name] for name in names[n * len(names) // shards : (n + 1) * len(names) // shards]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder
