"""What a model is made of, read from its files alone."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pitstop.engine.errors import CheckpointUnreadable
from pitstop.engine.vllm_backend.inventory import from_headers, inventory
from pitstop.engine.worker_ports import TensorSpec

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def safetensors(tensors: dict[str, tuple[str, list[int]]], *, size: int = 4) -> bytes:
    """Return a file of zeros with a header for tensors, given as dtype and shape."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        count = 1
        for n in shape:
            count *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count * size]}
        at += count * size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def checkpoint(folder: Path, tensors: dict[str, tuple[str, list[int]]], **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def test_names_dtypes_and_shapes_are_the_files(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {EMBED: ("F32", [4, 2]), "model.norm.weight": ("I32", [2]), HEAD: ("F32", [4, 2])})
    found = from_headers(folder)
    assert found.tensors == (
        TensorSpec(EMBED, "float32", (4, 2)),
        TensorSpec("model.norm.weight", "int32", (2,)),
        TensorSpec(HEAD, "float32", (4, 2)),
    )
    assert found.tied == {}


@pytest.mark.parametrize("stored", [[EMBED], [EMBED, HEAD]], ids=["one", "both"])
def test_a_tied_tensor_is_listed_once_whether_one_or_both_are_stored(tmp_path: Path, stored: list[str]) -> None:
    folder = checkpoint(tmp_path, {name: ("F32", [4, 2]) for name in stored}, tie_word_embeddings=True)
    found = from_headers(folder)
    assert [spec.name for spec in found.tensors] == [EMBED]
    assert found.tied == {HEAD: EMBED}


@pytest.mark.parametrize(
    ("stored", "config", "tied"),
    [
        pytest.param([EMBED], {}, {HEAD: EMBED}, id="models that tie by default do not say so"),
        pytest.param([EMBED, HEAD], {}, {}, id="a stored head is its own unless something else is said"),
        pytest.param([EMBED, HEAD], {"tie_word_embeddings": False}, {}, id="untied"),
        pytest.param(
            [f"language_model.{EMBED}"], {"text_config": {"tie_word_embeddings": True}},
            {f"language_model.{HEAD}": f"language_model.{EMBED}"}, id="nested",
        ),
        pytest.param(["transformer.wte.weight"], {}, {HEAD: "transformer.wte.weight"}, id="another family's name"),
    ],
)  # fmt: skip
def test_what_is_tied_follows_the_configuration(
    stored: list[str], config: dict[str, object], tied: dict[str, str]
) -> None:
    assert inventory([TensorSpec(name, "float32", (4, 2)) for name in stored], config).tied == tied


def test_leftovers_and_draft_layers_are_nobodys_to_send() -> None:
    kept = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.61.up_proj.weight"]
    dropped = [
        "model.layers.0.self_attn.rotary_emb.inv_freq", "h.0.attn.masked_bias", "embeddings.position_ids",
        "model.layers.2.eh_proj.weight", "mtp.fc.weight",
    ]  # fmt: skip
    found = inventory([TensorSpec(name, "float32", (1,)) for name in kept + dropped], {"num_hidden_layers": 2})
    assert [spec.name for spec in found.tensors] == kept


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(safetensors({"a": ("F32", [1]), "old": ("F32", [1])}))
    (tmp_path / "b.safetensors").write_bytes(safetensors({"b": ("F32", [1])}))
    (tmp_path / "consolidated.safetensors").write_bytes(safetensors({"c": ("F32", [1])}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert sorted(spec.name for spec in from_headers(tmp_path).tensors) == ["a", "b"]
    index.write_text(json.dumps({"weight_map": {"b": "a.safetensors"}}))
    with pytest.raises(CheckpointUnreadable, match="lacks tensors"):
        from_headers(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointUnreadable, match="gone"):
        from_headers(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"\xff" * 8, "not a safetensors file"),
        (safetensors({"a": ("F32", [2])})[:-1], "its header says"),
        (safetensors({"a": ("F32", [2])}) + b"x", "its header says"),
        (safetensors({"a": ("F16", [2])}), "bytes, not float16"),
        (safetensors({"a": ("F4", [2])}), "unknown dtype F4"),
        (struct.pack("<Q", 4) + b"[1]\n", "cannot be read"),
    ],
)
def test_a_file_that_is_broken_is_said_to_be(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointUnreadable, match=said):
        from_headers(tmp_path)


def test_no_file_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match=r"config\.json"):
        from_headers(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointUnreadable, match="no safetensors file"):
        from_headers(tmp_path)


def test_importing_the_backend_loads_nothing_heavy() -> None:
    code = "import sys, pitstop.engine.vllm_backend; print({'torch', 'vllm', 'transformers', 'numpy'} & {*sys.modules})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"
