"""An adapter finds the layers of the engine's checkpoint, whatever form of their names its trainer has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pitstop.engine.errors import AdapterRejected
from pitstop.engine.worker_ports import TensorSpec
from pitstop.transports.adapter_folder import write_adapter

CONFIG = {"r": 2, "lora_alpha": 4}


def adapter(inner: str) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{inner}layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.ones(shape)
        for layer, rank in ((0, 2), (1, 1))
        for side, shape in (("A", (rank, 8)), ("B", (8, rank)))
    }


def model(inner: str) -> list[TensorSpec]:
    return [TensorSpec(f"{inner}layers.{n}.self_attn.q_proj.weight", "float32", (8, 8)) for n in range(2)]


FORMS = ["language_model.model.", "model.language_model.", "model."]


@pytest.mark.parametrize("sent", [*FORMS, "_orig_mod.model.language_model."])
@pytest.mark.parametrize("stored", FORMS)
def test_b11_pairs_are_written_under_the_names_of_the_checkpoint(stored: str, sent: str, tmp_path: Path) -> None:
    ranks = {f"{sent.removeprefix('_orig_mod.')}layers.1.self_attn.q_proj": 1}
    write_adapter(tmp_path / "made", adapter(sent), CONFIG | {"rank_pattern": ranks}, model(stored))
    found = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert set(found) == set(adapter(stored))
    ups = [tensor for name, tensor in sorted(found.items()) if "lora_B" in name]
    assert [float(up.max()) for up in ups] == [2.0, 4.0]


def test_a_pair_of_a_layer_that_the_model_lacks_is_refused_by_the_name_it_came_with(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match=r"model\.language_model\.layers\.1\.self_attn\.q_proj has an adapter"):
        write_adapter(tmp_path / "made", adapter("model.language_model."), CONFIG, model("model.")[:1])
    assert not (tmp_path / "made").exists()
