"""A model with an adapter refits a real engine, which then equals a fresh one of the same model merged."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pitstop.engine import RolloutEngine, errors
from pitstop.transports import Publisher, merged, merged_tensors
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch
from tests.e2e.test_refit import greedy
from tests.transports.wrapped import Tuned, Wrapped

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj", "embed_tokens")
RANK, ALPHA = 4, 6.0


def model_of(tensors: dict[str, Tensor], *adapters: str) -> Wrapped:
    """Build the module tree that the names of a checkpoint describe, with adapters on `TARGETS`."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        at = root
        for piece in path:
            if piece not in at._modules:
                at.add_module(piece, nn.Module())
            at = at.get_submodule(piece)
        at.register_parameter(leaf, nn.Parameter(tensor.clone()))
    torch.manual_seed(5)
    for path in [n for n, _ in root.named_modules() if n.rpartition(".")[2] in TARGETS]:
        parent, _, own = path.rpartition(".")
        weight: Any = root.get_submodule(path).weight
        base = nn.Embedding(1, 1) if own == "embed_tokens" else nn.Linear(1, 1, bias=False)
        base.weight = weight
        layer = Tuned(base)
        for adapter in adapters or ("default",):
            layer.add(adapter, RANK, ALPHA)
            if own != "embed_tokens":
                nn.init.normal_(layer.lora_B[adapter].get_parameter("weight"), std=0.3)
        root.get_submodule(parent).add_module(own, layer)
    return Wrapped(root)


def merged_by_hand(model: Wrapped, folder: Path, original: Path) -> Path:
    """Write the checkpoint that the model and its first adapter amount to."""
    shutil.copytree(original, folder)
    content = load_file(original / "model.safetensors")
    root: Any = model.base_model.model
    for path, layer in root.named_modules():
        if not isinstance(layer, Tuned):
            continue
        if "embed" in path:
            a, b = next(iter(layer.lora_embedding_A.values())), next(iter(layer.lora_embedding_B.values()))
            delta = (b.double() @ a.double()).T
        else:
            up: Any = next(iter(layer.lora_B.values()))
            down: Any = next(iter(layer.lora_A.values()))
            delta = up.weight.double() @ down.weight.double()
        name = f"{path}.weight"
        content[name] = (content[name].double() + ALPHA / RANK * delta).to(content[name].dtype).detach().contiguous()
    save_file(content, folder / "model.safetensors")
    return folder


async def test_a_wrapped_model_refits_an_engine_to_what_the_merged_model_says_and_the_next_version_undoes_it(
    launch: Launch, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("llama", 0)
    model = model_of(load_file(path / "model.safetensors"))
    whole = merged_by_hand(model, tmp_path / "merged", path)
    args = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20}
    async with RolloutEngine.launch(whole, engine_args=args, start_method="fork") as fresh:
        wanted, prints = await greedy(fresh), await fresh.fingerprints()
    async with launch("llama", 0) as engine:
        before = await greedy(engine)
        assert before != wanted
        await engine.refit(model, weight_version=1)
        assert await greedy(engine) == wanted
        assert list((await engine.fingerprints()).values()) == list(prints.values())
        await engine.refit(path, weight_version=2)
        assert await greedy(engine) == before
        async with await Publisher.connect_async(engine.address) as publisher:
            await publisher.publish(model, weight_version=3)
            assert await greedy(engine) == wanted
            adapter = {name: value.detach() for name, value in model.state_dict().items() if "lora_" in name}
            config = {"r": RANK, "lora_alpha": ALPHA}
            await publisher.publish(path, weight_version=4)
            await publisher.publish(
                merged_tensors(load_file(path / "model.safetensors"), adapter, config), weight_version=5
            )
            assert await greedy(engine) == wanted


async def test_an_adapter_that_cannot_be_sent_costs_nothing_and_names_its_tensor(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    tensors = load_file(checkpoint("llama", 0) / "model.safetensors")
    model = model_of(tensors, "math", "code")
    async with launch("llama", 0) as engine:
        before = await greedy(engine)
        with pytest.raises(errors.AdapterRejected, match="2 adapters"):
            engine.refit(model, weight_version=1)
        root: Any = model.base_model.model
        root.get_submodule("model.layers.1.mlp.down_proj").lora_B["math"].weight.data[3, 1] = math.nan
        with pytest.raises(errors.MergeUnproven, match=r"layers.1.mlp.down_proj.weight.*not finite"):
            await engine.refit(merged(model, adapter="math"), weight_version=1)
        assert engine.replicas[0].phase.value == "serving"
        assert await greedy(engine) == before
        await engine.refit(merged(model, adapter="code"), weight_version=1)
        assert await greedy(engine) != before
