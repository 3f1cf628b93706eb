"""Where a drafter's weights come from, and which tensors of a version are its own. No torch, no content.

A drafter is a model with a checkpoint of its own (Eagle3), whose tensors are published as `draft.<name>`; or it is
further layers of the target's checkpoint (MTP), published like all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from pitstop.engine.errors import CheckpointUnreadable
from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected
from pitstop.engine.vllm_backend.inventory import _files, _header, from_headers, is_draft_layer, read_config
from pitstop.engine.worker_ports import Inventory, TensorSpec

Choice = Literal["trained", "frozen"]
PREFIX: Final = "draft."

_EMBEDDING: Final = ".embed_tokens.weight"
_HEAD: Final = ".shared_head.head.weight"
# Which target tokens the drafter has: only training needs to know.
_UNLOADED: Final = re.compile(r"(?:^|\.)t2d$")
_WITHOUT_WEIGHTS: Final = frozenset(
    {"ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states"}
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter that has weights.

    Attributes:
        own: it has a checkpoint of its own, at `folder`; else it is layers of the target's, which is `folder` then.
        trained: refits bring its tensors. If not, they are loaded once and stay.
        layers: how many layers the target has; the layers behind them are the drafter's.
    """

    own: bool
    trained: bool
    folder: str
    layers: int | None = None

    def takes(self, name: str) -> bool:
        """Say whether a published tensor is the drafter's."""
        return name.startswith(PREFIX) if self.own else is_draft_layer(name, self.layers)


def draft_of(model: str, engine_args: Mapping[str, Any], choice: Choice | None) -> Draft | None:
    """Return the drafter that engine arguments ask for; None if there is none, or one without weights.

    Without a choice, layers of the target's own checkpoint are trained with it, and another checkpoint is not.

    Raises:
        EngineArgumentRejected: a choice without a drafter, or one that is none of the two.
    """
    if choice not in (None, "trained", "frozen"):
        raise EngineArgumentRejected(f"drafter is 'trained' or 'frozen', not {choice!r}", argument="drafter")
    asked = engine_args.get("speculative_config") or {}
    path = str(asked.get("model") or model)
    if not asked or _WITHOUT_WEIGHTS & {asked.get("method"), path}:
        if choice is not None:
            raise EngineArgumentRejected(
                f"drafter={choice!r} is about a drafter's weights, and speculative_config asks for none",
                argument="drafter",
            )
        return None
    own = path != model and Path(path).absolute() != Path(model).absolute()
    return Draft(own, choice == "trained" if choice else not own, path)


def with_drafter(inventory: Inventory, folder: Path, draft: Draft | None) -> Inventory:
    """Add a trained drafter's tensors to its target's, and say which tensors of the checkpoint are not loaded.

    `folder` is the target's; a drafter's own has been downloaded.

    Raises:
        CheckpointUnreadable: it is trained, and nothing says which tensors it has.
    """
    specs = _own(Path(draft.folder)) if draft is not None and draft.own and draft.trained else None
    dropped: tuple[str, ...] = ()
    if specs is not None:
        dropped = tuple(f"{PREFIX}{name}" for name in specs.unused)
        tied = {f"{PREFIX}{twin}": f"{PREFIX}{base}" for twin, base in specs.tied.items()}
        added = tuple(replace(spec, name=f"{PREFIX}{spec.name}") for spec in specs.tensors)
        # Trainers pad a drafter's vocabulary as they do the target's.
        inventory = replace(
            _added(inventory, added, tied),
            vocabulary=(*inventory.vocabulary, *(f"{PREFIX}{name}" for name in specs.vocabulary)),
        )
    layers = layers_of(folder)
    try:
        behind = list(_behind(folder, layers))
    except CheckpointUnreadable:
        # A model whose weights are nowhere.
        behind = []
    if draft is None or draft.own or not draft.trained:
        return replace(inventory, unused=(*dropped, *(spec.name for spec in behind)))
    if not behind:
        raise CheckpointUnreadable(
            f"{folder} has no tensors of a drafter, so nothing says which ones a refit has to bring; "
            "launch with drafter='frozen' if none are trained"
        )
    ties = dict(_ties(behind, inventory))
    copies = tuple(spec.name for spec in behind if spec.name.endswith((_EMBEDDING, _HEAD)))
    found = _added(inventory, tuple(spec for spec in behind if spec.name not in ties), ties)
    return replace(found, vocabulary=(*found.vocabulary, *copies))


def tensors_of(draft: Draft) -> dict[Path, list[str]]:
    """Return the files that hold a drafter's tensors, each with those that it holds.

    Raises:
        CheckpointUnreadable: there are none.
    """
    folder = Path(draft.folder)
    layers = layers_of(folder)
    found = {
        path: [
            name
            for name in listed or _header(path)
            if not _UNLOADED.search(name) and (draft.own or is_draft_layer(name, layers))
        ]
        for path, listed in _files(folder).items()
    }
    found = {path: names for path, names in found.items() if names}
    if not found:
        raise CheckpointUnreadable(f"{folder} has no tensors of a drafter")
    return found


def _own(folder: Path) -> Inventory:
    found = from_headers(folder)
    unloaded = tuple(spec.name for spec in found.tensors if _UNLOADED.search(spec.name))
    kept = tuple(spec for spec in found.tensors if spec.name not in unloaded)
    return replace(found, tensors=kept, unused=unloaded)


def _added(inventory: Inventory, added: tuple[TensorSpec, ...], tied: Mapping[str, str]) -> Inventory:
    return replace(
        inventory,
        tensors=(*inventory.tensors, *added),
        tied={**inventory.tied, **tied},
        drafter=tuple(spec.name for spec in added),
    )


def _ties(behind: Iterable[TensorSpec], inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Yield copies of the embedding and the head that are stored with draft layers: vLLM gives them the target's."""
    known = {spec.name for spec in inventory.tensors}
    embedding = next((name for name in known if name.endswith(_EMBEDDING)), None)
    head = inventory.tied.get("lm_head.weight", "lm_head.weight")
    for spec in behind:
        base = embedding if spec.name.endswith(_EMBEDDING) else head if spec.name.endswith(_HEAD) else None
        if base in known and base is not None:
            yield spec.name, base


def _behind(folder: Path, layers: int | None) -> Iterator[TensorSpec]:
    for path, listed in _files(folder).items():
        # What an index says need not be looked up.
        if listed is None or any(is_draft_layer(name, layers) for name in listed):
            found = _header(path)
            yield from (found[name] for name in listed or found if name in found and is_draft_layer(name, layers))


def layers_of(folder: Path) -> int | None:
    """Return how many layers a checkpoint's model has, its drafter's aside."""
    config = read_config(folder)
    nested = config.get("text_config")
    layers = (nested if isinstance(nested, Mapping) else config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else None
