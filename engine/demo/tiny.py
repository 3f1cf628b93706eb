"""A random little Llama with a tokenizer of its own: what tests and the impatient train, made without any download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

LENGTH: Final = 1024
VOCABULARY: Final = 320
END: Final = "<|im_end|>"
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", END)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": LENGTH,
    "mlp_bias": False,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}
# Enough for the merges of a few dozen common letter pairs.
_CORPUS: Final = (
    "the answer to the question is the number that comes after the other number in the line of numbers",
    "a letter is a sign for a sound and a word is a line of letters with a meaning of its own",
    "write some letters and nothing else then stop where the line ends",
    "user assistant system what is one and two three four five six seven eight nine ten",
)


def write(target: Path) -> None:
    """Write the checkpoint into the folder `target`; the same bytes every time."""
    import torch
    from safetensors.torch import save_file

    (target / "config.json").write_text(json.dumps(CONFIG, indent=2))
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * scale).to(torch.bfloat16)

    hidden, inner, head = 64, 128, 32
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden, 0.1),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shapes = {
        "self_attn.q_proj": (2 * head, hidden),
        "self_attn.k_proj": (head, hidden),
        "self_attn.v_proj": (head, hidden),
        "self_attn.o_proj": (hidden, 2 * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns, columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(_trained(), target, bos=SPECIAL[1], eos=END, pad=END, chat_template=CHAT_TEMPLATE, length=LENGTH)


def _trained() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_tokenizer(
    tokenizer: Any, target: Path, *, bos: str, eos: str, pad: str, chat_template: str, length: int
) -> None:
    """Write a `tokenizers.Tokenizer` the way that transformers and vLLM read it."""
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        "chat_template": chat_template,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
