"""Turn a Llama-family GGUF file into a Hugging Face checkpoint directory, bf16.

Done here and not through transformers: a model that it loads from GGUF stays packed and refuses to be saved, and it
needs accelerate. What such a file holds is little: weights under other names, with the rows of q and k interleaved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pitstop.engine.demo.tiny import write_tokenizer

TOP: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN: Final = 3


class UnknownTensor(ValueError):
    """A tensor of the file has no place in a Llama checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__(f"GGUF tensor {name!r} has no counterpart in a Llama checkpoint")
        self.name = name


def checkpoint_name(name: str) -> str:
    """Return a GGUF tensor's name in a Hugging Face checkpoint."""
    if name in TOP:
        return TOP[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if found is None or found[2] not in LAYER:
        raise UnknownTensor(name)
    return f"model.layers.{found[1]}.{LAYER[found[2]]}.weight"


def deinterleave(rows: Any, heads: int) -> Any:
    """llama.cpp stores each head's rotary pairs side by side, Hugging Face in two halves."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def convert(source: Path, target: Path) -> None:
    """Write the model of a GGUF file into the folder `target`: weights, config, tokenizer, chat template."""
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from torch import bfloat16, from_numpy

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if f".{part}." in tensor.name:
                values = deinterleave(values, count)
        tensors[checkpoint_name(tensor.name)] = from_numpy(values.copy()).to(bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _write_config(fields, target, tied="lm_head.weight" not in tensors)
    _write_tokenizer(fields, target)


def _write_config(fields: Mapping[str, Any], target: Path, *, tied: bool) -> None:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _write_tokenizer(fields: Mapping[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    # The file says only "smollm": every digit is a token of its own, the rest is byte-level as in GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    control = [name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    write_tokenizer(
        tokenizer,
        target,
        bos=names[fields["tokenizer.ggml.bos_token_id"]],
        eos=names[fields["tokenizer.ggml.eos_token_id"]],
        pad=names[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        length=fields["llama.context_length"],
    )
