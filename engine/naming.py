"""Which tensor of a checkpoint an offered one is, whatever the trainer calls it. Pure.

Trainers and checkpoints disagree about wrappers, about where in a vision-language model a part hangs, and about whether
experts are stored one by one. A rename is taken only where it is unambiguous: of several names that would come to the
same, none is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final

from pitstop.engine.errors import ShapeMismatch
from pitstop.engine.worker_ports import TensorSpec

_WRAPPERS: Final = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
)
_RENAMES: Final = (
    # The language model of a vision-language one: beside the other parts, or among them, or the model itself.
    (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^model\.(visual|vision_tower|multi_modal_projector|audio_tower)\."), r"\1."),
    # Gemma3's tower, of which transformers 5 drops a level.
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
    # GPT-2 and its like, which were saved without the head.
    (re.compile(r"^transformer\."), ""),
    # Mixtral's, in transformers 5.
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
)
_EXPERT: Final = re.compile(r"^(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_FUSED: Final = re.compile(r"^(.+\.experts)\.(gate_up_proj|down_proj|w13_weight|w2_weight)(?:\.weight)?$")
_ROLE: Final = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_FORM: Final = {"gate_up_proj": "gate_up", "w13_weight": "gate_up", "down_proj": "down", "w2_weight": "down"}


def plain(name: str) -> str:
    """Strip what trainer-side wrappers (DDP, FSDP, torch.compile, activation checkpointing, PEFT) add to a name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def common(name: str) -> str:
    """Return what all names of a tensor come to."""
    found = plain(name)
    for pattern, replacement in _RENAMES:
        found = pattern.sub(replacement, found)
    return found


def home(name: str) -> str:
    """Return what `common` does; of experts, one by one or fused, what all of one kind of a layer come to."""
    found = common(name)
    if single := _EXPERT.match(found):
        return f"{single[1]}.{'down' if _ROLE[single[3]] == 'down' else 'gate_up'}"
    fused = _FUSED.match(found)
    return f"{fused[1]}.{_FORM[fused[2]]}" if fused else found


@dataclass(frozen=True, slots=True)
class Part:
    """`spec`, of which the content are that many elements of an offered tensor, from its flat element `start` on."""

    spec: TensorSpec
    start: int


@dataclass(slots=True)
class _Experts:
    """A layer's experts that are stored one by one, by role and number."""

    stored: dict[str, dict[int, TensorSpec]] = field(default_factory=lambda: {"gate": {}, "up": {}, "down": {}})

    @property
    def expected(self) -> dict[str, tuple[int, int, int]] | None:
        """The shapes that fused tensors have; None if these experts are not gated ones, all alike."""
        numbers = [set(experts) for experts in self.stored.values()]
        shapes = [{spec.shape for spec in experts.values()} for experts in self.stored.values()]
        count = len(numbers[0])
        if any(found != set(range(count)) for found in numbers) or any(len(found) != 1 for found in shapes):
            return None
        (gate,), (up,), (down,) = shapes
        if gate != up or len(gate) != 2 or down != gate[::-1]:
            return None
        inner, hidden = gate
        return {"gate_up": (count, 2 * inner, hidden), "down": (count, hidden, inner)}

    def split(self, form: str, spec: TensorSpec) -> tuple[Part, ...] | None:
        """Return which parts of a fused tensor are which experts', where they can be."""
        expected = self.expected
        if expected is None:
            return None
        # Where a matrix is square its shape does not say which way round it is, but then the other one's does.
        count, rows, columns = expected[form]
        if spec.shape != (count, rows, columns):
            remedy = "; publish them with transpose(1, 2)" if spec.shape == (count, columns, rows) else ""
            raise ShapeMismatch(
                f"the fused experts {spec.name} are {list(spec.shape)}, not {list(expected[form])}{remedy}",
                tensor=spec.name,
            )
        parts, start = [], 0
        for number in sorted(self.stored["down"]):
            for role in ("gate", "up") if form == "gate_up" else ("down",):
                part = self.stored[role][number]
                parts.append(Part(part, start))
                start += prod(part.shape)
        return tuple(parts)


class Names:
    """A model's tensors, to be found by what a trainer calls them."""

    def __init__(self, known: Mapping[str, TensorSpec]) -> None:
        self._known = known

    @cached_property
    def _common(self) -> dict[str, str | None]:
        # Made for the first name that needs it: a trainer whose names are the checkpoint's need not wait for it.
        found: dict[str, str | None] = {}
        for name in self._known:
            reduced = common(name)
            found[reduced] = None if reduced in found else name
        return found

    @cached_property
    def _experts(self) -> dict[str, _Experts]:
        found: dict[str, _Experts] = {}
        for reduced, name in self._common.items():
            if name is not None and (match := _EXPERT.match(reduced)):
                experts = found.setdefault(match[1], _Experts())
                experts.stored[_ROLE[match[3]]][int(match[2])] = self._known[name]
        return found

    def find(self, name: str) -> TensorSpec | None:
        """Return the tensor that a name means."""
        found = self._known.get(name) or self._known.get(plain(name))
        if found is None and (unique := self._common.get(common(name))) is not None:
            found = self._known[unique]
        return found

    def resolve(self, offered: Sequence[TensorSpec]) -> list[tuple[Part, ...] | TensorSpec | None]:
        """Return what each offered tensor is: one of the model's, parts that are several of its, or nothing known.

        Raises:
            ShapeMismatch: fused experts are not laid out as the model's, one by one, are.
        """
        return [self.find(spec.name) or self._split(spec) for spec in offered]

    def _split(self, spec: TensorSpec) -> tuple[Part, ...] | None:
        match = _FUSED.match(common(spec.name))
        experts = self._experts.get(match[1]) if match else None
        return experts.split(_FORM[match[2]], spec) if match and experts else None

    def fused(self, names: Iterable[str]) -> str:
        """Say, as a sentence, what to publish instead of names that are single experts of a model with fused ones."""
        for match in filter(None, (_EXPERT.match(common(name)) for name in names)):
            wanted = "down" if _ROLE[match[3]] == "down" else "gate_up"
            for suffix in (suffix for suffix, form in _FORM.items() if form == wanted):
                if (known := self._common.get(f"{match[1]}.{suffix}")) is not None:
                    shape = list(self._known[known].shape)
                    return (
                        f" The model's checkpoint has its experts in one tensor: publish {known}, stacked as {shape}."
                    )
        return ""
