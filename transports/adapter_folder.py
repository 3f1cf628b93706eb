"""An adapter as the folder that engines load: checked against the model that it is for, and written in one form."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import AdapterRejected, CheckpointUnreadable
from pitstop.engine.naming import Names
from pitstop.engine.worker_ports import TensorSpec
from pitstop.transports.adapters import called, merged_tensors

if TYPE_CHECKING:
    from torch import Tensor

_TENSORS: Final = "adapter_model.safetensors"
_CONFIG: Final = "adapter_config.json"

Given = Mapping[str, "Tensor"] | Iterable[tuple[str, "Tensor"]] | str | os.PathLike[str]


def write_adapter(folder: Path, given: Given, config: Mapping[str, Any] | None, model: Sequence[TensorSpec]) -> None:
    """Write an adapter of the `model`: low-rank pairs of linear layers, given by name or as PEFT's folder.

    Its scaling is in the pairs afterwards, whatever pattern it had: engines do not read all of PEFT's.

    Raises:
        AdapterRejected: it is not for this model, or an engine cannot run it; names the tensor.
        CheckpointUnreadable: the folder is not one of an adapter.
    """
    import torch
    from safetensors.torch import save_file

    if isinstance(given, str | os.PathLike):
        tensors, config = _read(Path(given))
    else:
        tensors = dict(given.items() if isinstance(given, Mapping) else given)
    if config is None:
        raise AdapterRejected("an adapter's tensors come with its config: at least `r` and `lora_alpha`")
    # Under the trainer's names: patterns of its config are about these.
    theirs = called(tensors, Names({spec.name: spec for spec in model}))
    ours = {theirs.get(spec.name, spec.name): spec.name for spec in model}
    base = {theirs.get(s.name, s.name): torch.empty(s.shape, dtype=torch.float32, device="meta") for s in model}
    pairs: dict[str, Tensor] = {}
    ranks = []
    for part in merged_tensors(base, tensors, config).parts:
        if part.tensor is not base[part.name]:
            raise AdapterRejected(
                f"{part.name} is trained whole, which engines do not run beside theirs: publish it merged",
                tensor=part.name,
            )
        if part.delta is None:
            continue
        if part.delta.transposed:
            raise AdapterRejected(
                f"{part.name} is an embedding or lies transposed, whose adapter engines do not run: publish it merged",
                tensor=part.name,
            )
        home = f"base_model.model.{ours[part.name].removesuffix('.weight')}"
        up = part.delta.up.detach().float().cpu() * part.delta.scaling
        down = part.delta.down.detach().float().cpu().contiguous()
        if not bool(torch.isfinite(up).all() and torch.isfinite(down).all()):
            raise AdapterRejected(f"the adapter of {part.name} has values that are not finite", tensor=part.name)
        pairs[f"{home}.lora_A.weight"], pairs[f"{home}.lora_B.weight"] = down, up.contiguous()
        ranks.append(down.shape[0])
    if not pairs:
        raise AdapterRejected("the adapter has no tensors")
    targets = sorted({name.split(".")[-3] for name in pairs})
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": max(ranks), "lora_alpha": max(ranks),
        "target_modules": targets,
    }  # fmt: skip
    folder.mkdir(mode=0o700)
    try:
        save_file(pairs, folder / _TENSORS)
        (folder / _CONFIG).write_text(json.dumps(told))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((path / _CONFIG).read_text())
        tensors = load_file(path / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointUnreadable(f"{path} is not the folder of an adapter: {error}", file=str(path)) from None
    if not isinstance(config, dict):
        raise CheckpointUnreadable(f"{path / _CONFIG} is not a config", file=str(path))
    return tensors, config
