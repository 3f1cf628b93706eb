"""Tiny random checkpoints in the form that a trainer writes: config, tokenizer, safetensors with Hugging Face names.

Two seeds of one family are the T0 and T1 of the tests: same shapes, unrelated content, so that greedy tokens differ
from the first one on. Torch is imported by the functions that make tensors, not by this module.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, EXPERTS = 64, 2, 2, 1, 32, 128, 320, 4
BOS, EOS, PAD = 256, 257, 258
ROUTER_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Family:
    """An architecture: what its `config.json` adds to the common part, and what its layers hold."""

    architecture: str
    model_type: str
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    more_norms: bool = False
    experts: str = ""
    count: int = EXPERTS
    inner: int = INNER
    fused: bool = False  #: experts are stored in one tensor
    dense: int = 0  #: so many layers without experts come first
    config: dict[str, Any] = field(default_factory=dict)


MOE = {"num_experts_per_tok": 2, "output_router_logits": False}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama"),
    "tied": Family("LlamaForCausalLM", "llama", tied=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", qk_norm=True),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        tied=True,
        qk_norm=True,
        more_norms=True,
        config={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_local_base_freq": 1000.0,
        },
    ),
    "mixtral": Family("MixtralForCausalLM", "mixtral", experts="mixtral", config={**MOE, "num_local_experts": EXPERTS}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        qk_norm=True,
        experts="qwen3_moe",
        config={
            **MOE,
            "num_experts": EXPERTS,
            "moe_intermediate_size": INNER,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        qk_norm=True,
        experts="glm4_moe",
        dense=1,
        config={
            "num_experts_per_tok": 2,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": INNER,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        tied=True,
        config={
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 2048,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
        },
    ),
}
FAMILIES["qwen3_moe_fused"] = replace(FAMILIES["qwen3_moe"], fused=True)
RARE = {
    "many_experts": replace(
        FAMILIES["glm4_moe"], count=256, inner=32,
        config={**FAMILIES["glm4_moe"].config, "n_routed_experts": 256, "moe_intermediate_size": 32},
    ),
}  # fmt: skip
"""What one test each is about."""  # fmt: skip


def family_of(name: str) -> Family:
    return FAMILIES.get(name) or RARE[name]


def config(family: str) -> dict[str, Any]:
    made = family_of(family)
    return {
        "architectures": [made.architecture], "model_type": made.model_type, "torch_dtype": "float32",
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "intermediate_size": INNER, "vocab_size": VOCAB, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.02,
        "tie_word_embeddings": made.tied, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
        "attention_bias": False, "use_cache": True, **made.config,
    }  # fmt: skip


def _experts(family: Family, layer: str) -> dict[str, tuple[int, ...]]:
    inner, gate, up, down = {
        "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
        "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
        "glm4_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    }[family.experts]
    count, width = family.count, family.inner
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.{inner}.gate.weight": (count, HIDDEN)}
    if family.experts == "glm4_moe":
        shapes[f"{layer}.{inner}.gate.{ROUTER_BIAS}"] = (count,)
        shapes |= _dense(f"{layer}.{inner}.shared_experts", width)
    if family.fused:
        shapes[f"{layer}.{inner}.experts.gate_up_proj"] = (count, 2 * width, HIDDEN)
        shapes[f"{layer}.{inner}.experts.down_proj"] = (count, HIDDEN, width)
        return shapes
    for n in range(count):
        shapes[f"{layer}.{inner}.experts.{n}.{gate}.weight"] = (width, HIDDEN)
        shapes[f"{layer}.{inner}.experts.{n}.{up}.weight"] = (width, HIDDEN)
        shapes[f"{layer}.{inner}.experts.{n}.{down}.weight"] = (HIDDEN, width)
    return shapes


def _dense(inner: str, width: int = INNER) -> dict[str, tuple[int, ...]]:
    return {
        f"{inner}.gate_proj.weight": (width, HIDDEN),
        f"{inner}.up_proj.weight": (width, HIDDEN),
        f"{inner}.down_proj.weight": (HIDDEN, width),
    }


def _gpt2() -> dict[str, tuple[int, ...]]:
    """Return what GPT-2 has: biases everywhere, positions in a table, matrices the other way round."""
    found: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCAB, HIDDEN)}
    found["transformer.wpe.weight"] = (2048, HIDDEN)
    for n in range(LAYERS):
        layer = f"transformer.h.{n}"
        matrices = (("attn.c_attn", 3), ("attn.c_proj", 1), ("mlp.c_fc", 4))
        for part in ("ln_1", "ln_2"):
            found[f"{layer}.{part}.weight"] = found[f"{layer}.{part}.bias"] = (HIDDEN,)
        for part, times in matrices:
            found[f"{layer}.{part}.weight"] = (HIDDEN, times * HIDDEN)
            found[f"{layer}.{part}.bias"] = (times * HIDDEN,)
        found[f"{layer}.mlp.c_proj.weight"], found[f"{layer}.mlp.c_proj.bias"] = (4 * HIDDEN, HIDDEN), (HIDDEN,)
    found["transformer.ln_f.weight"] = found["transformer.ln_f.bias"] = (HIDDEN,)
    return found


def shapes(family: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a family's checkpoint, in the order of the layers."""
    made = family_of(family)
    if made.model_type == "gpt2":
        return _gpt2()
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for part, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            found[f"{layer}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if made.qkv_bias:
                found[f"{layer}.self_attn.{part}_proj.bias"] = (rows,)
        found[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if made.qk_norm:
            found[f"{layer}.self_attn.q_norm.weight"] = found[f"{layer}.self_attn.k_norm.weight"] = (HEAD_DIM,)
        found[f"{layer}.input_layernorm.weight"] = found[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
        if made.more_norms:
            found[f"{layer}.pre_feedforward_layernorm.weight"] = (HIDDEN,)
            found[f"{layer}.post_feedforward_layernorm.weight"] = (HIDDEN,)
        if made.experts and n >= made.dense:
            found |= _experts(made, layer)
        else:
            found |= _dense(f"{layer}.mlp")
    found["model.norm.weight"] = (HIDDEN,)
    if not made.tied:
        found["lm_head.weight"] = (VOCAB, HIDDEN)
    return found


def tensors(family: str, seed: int, *, dtype: str = "float32") -> dict[str, Tensor]:
    """Return random weights whose logits are spread widely enough for greedy decoding to have no near ties."""
    import torch

    chance = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, shape in shapes(family).items():
        noise = torch.randn(shape, generator=chance)
        if name.endswith(ROUTER_BIAS):
            # What a cast to bfloat16 would leave two values of.
            made[name] = 6.82 + 0.24 * torch.rand(shape, generator=chance)
            continue
        if len(shape) == 1:
            value = 0.1 * noise + (0.0 if name.endswith("bias") or family_of(family).more_norms else 1.0)
        elif name.startswith(("model.embed_tokens", "lm_head", "transformer.wte", "transformer.wpe")):
            # Gemma's embeddings are multiplied by the root of the width.
            value = (0.1 if family_of(family).more_norms else 0.5) * noise
        else:
            value = noise * 2.0 / math.sqrt(shape[-1])
        made[name] = value.to(getattr(torch, dtype))
    return made


def tokenizer_json() -> str:
    """Return a byte-level BPE in which `he` + `llo` and `hello` both exist, with one BOS before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    vocabulary |= {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("Ġ", "t"), ("i", "n"), ("o", "r"), ("a", "n")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    made.add_special_tokens(["<s>", "</s>", "<pad>"])
    return str(made.to_str())


CHAT = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


def write(folder: Path, family: str, seed: int, *, dtype: str = "float32", shards: int = 1) -> Path:
    """Write a checkpoint into `folder` and return it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config(family), "torch_dtype": dtype}))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False, "chat_template": CHAT, "model_max_length": 2048,
        })
    )  # fmt: skip
    # A server that took its defaults from here would sample other tokens than the trainer asked for.
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.3, "top_k": 5, "top_p": 0.5})
    )
    content = tensors(family, seed, dtype=dtype)
    if shards == 1:
        save_file(content, folder / "model.safetensors")
        return folder
    where: dict[str, str] = {}
    for n in range(shards):
        name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: content[key] for key in list(content)[n::shards]}
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder
