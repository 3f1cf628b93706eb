"""The checkpoint tensors that a model is made of, read from safetensors headers. No torch, no content."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from pitstop.engine.errors import CheckpointUnreadable, names
from pitstop.engine.worker_ports import ITEMSIZE, Inventory, TensorSpec

DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""safetensors' dtype names in torch's words."""

_LONGEST_HEADER: Final = 100 << 20  # safetensors' own limit
_LEFTOVERS: Final = re.compile(
    r"(\.rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.attn\.(bias|masked_bias)|\.attention\.(bias|masked_bias)"
    r"|(^|\.)position_ids)$"
)
"""Buffers that older checkpoints store and that no model loads."""
_HEAD: Final = "lm_head.weight"
_HEADS: Final = re.compile(r"(^|\.)(lm_head|embed_out)\.(weight|bias)$")
_EMBEDDING: Final = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$")
_INNER: Final = r"^(?:model\.|language_model\.(?:model\.)?|model\.language_model\.)?"
_LAYER: Final = re.compile(_INNER + r"layers\.(\d+)\.")
_MTP: Final = re.compile(_INNER + r"mtp(?:_\w+)?\.")


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's `config.json`."""
    return _json(folder / "config.json")


def from_headers(folder: Path) -> Inventory:
    """Read the inventory of a checkpoint folder.

    Raises:
        CheckpointUnreadable: a file is absent, cut short, or not safetensors.
    """
    config = read_config(folder)
    specs: dict[str, TensorSpec] = {}
    for path, wanted in _files(folder).items():
        found = _header(path)
        if absent := set(wanted or found) - found.keys():
            raise CheckpointUnreadable(f"{path} lacks tensors that the index puts there: {names(sorted(absent))}")
        specs |= {name: found[name] for name in wanted or found}
    return inventory(specs.values(), config)


def inventory(specs: Iterable[TensorSpec], config: Mapping[str, Any]) -> Inventory:
    """Leave out what no model loads, and list tensors that the model ties once, under the embedding's name."""
    layers = _text(config).get("num_hidden_layers")
    kept = {spec.name: spec for spec in specs if not _unloaded(spec.name, layers)}
    tied = _tied(list(kept), config)
    vocabulary = tuple(name for name in dict.fromkeys([*kept, *tied]) if _EMBEDDING.search(name) or _HEADS.search(name))
    return Inventory(tuple(spec for name, spec in kept.items() if name not in tied), tied, vocabulary)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _unloaded(name: str, layers: object) -> bool:
    return _LEFTOVERS.search(name) is not None or is_draft_layer(name, layers)


def is_draft_layer(name: str, layers: object) -> bool:
    """Say whether a checkpoint's tensor belongs to a drafter, not to the model, behind whose `layers` it is stored."""
    if _MTP.search(name):
        return True
    layer = _LAYER.search(name)
    return isinstance(layers, int) and layer is not None and int(layer[1]) >= layers


def _tied(stored: list[str], config: Mapping[str, Any]) -> dict[str, str]:
    embeddings = sorted((name for name in stored if _EMBEDDING.search(name)), key=len)
    heads = [name for name in stored if name == _HEAD or name.endswith(f".{_HEAD}")]
    said = config.get("tie_word_embeddings", _text(config).get("tie_word_embeddings"))
    # Models that tie by default leave the word out of the file; their checkpoint has no head then.
    if not embeddings or not (said if said is not None else not heads):
        return {}
    base = embeddings[0]
    prefix = "language_model." if base.startswith("language_model.model.") else ""
    return dict.fromkeys(heads or [f"{prefix}{_HEAD}"], base)


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files of a checkpoint, each with the names that the index says it holds (None: whatever it does)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files: dict[Path, list[str] | None] = {}
        for name, file in _json(index).get("weight_map", {}).items():
            listed = files.setdefault(folder / Path(file).name, [])
            if listed is not None:
                listed.append(name)
        return files
    single = folder / "model.safetensors"
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise CheckpointUnreadable(f"{folder} has no safetensors file")
    return dict.fromkeys(found)


def _header(path: Path) -> dict[str, TensorSpec]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise CheckpointUnreadable(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != end:
            raise CheckpointUnreadable(f"{path} has {path.stat().st_size} bytes, its header says {end}")
        return {name: _spec(path, name, entry) for name, entry in header.items()}
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnreadable(f"{path} cannot be read: {error}") from error


def _spec(path: Path, name: str, entry: Mapping[str, Any]) -> TensorSpec:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointUnreadable(f"{path}: {name} has the unknown dtype {entry['dtype']}")
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != ITEMSIZE[dtype] * prod(shape):
        raise CheckpointUnreadable(f"{path}: {name} has {end - begin} bytes, not {dtype} {list(shape)}")
    return TensorSpec(name, dtype, shape)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointUnreadable(f"{path} is not a JSON object")
    return content
