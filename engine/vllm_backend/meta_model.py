"""The inventory of a model whose weights are nowhere: taken from transformers' own model on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pitstop.engine.errors import CheckpointUnreadable
from pitstop.engine.vllm_backend.inventory import inventory, read_config
from pitstop.engine.worker_ports import Inventory, TensorSpec


def from_meta_model(folder: Path, *, trust_remote_code: bool = False) -> Inventory:
    """Build the model without memory and read what it would save.

    Raises:
        CheckpointUnreadable: transformers does not know the architecture.
    """
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = _kind(config).from_config(config, trust_remote_code=trust_remote_code)
        content = _as_saved(model)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CheckpointUnreadable(f"{folder}: transformers cannot build the model: {error}") from error
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in content.items()
    ]
    said = {"tie_word_embeddings": bool(getattr(config.get_text_config(), "tie_word_embeddings", False))}
    return inventory(specs, read_config(folder) | said)


def _kind(config: Any) -> Any:
    """Return what builds the model that a checkpoint of this configuration was saved from."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = any(str(name).endswith("ForConditionalGeneration") for name in config.architectures or ())
    # Some vision-language models are known to the other one too, but as their text part alone.
    known = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if whole and known else AutoModelForCausalLM


def _as_saved(model: Any) -> dict[str, Any]:
    content: dict[str, Any] = model.state_dict()
    try:
        # transformers 5 keeps experts fused in memory and takes them apart when it saves.
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return content
    saved: dict[str, Any] = revert_weight_conversion(model, content)
    return saved
