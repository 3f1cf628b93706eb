"""A load plan: for each tensor of a checkpoint, which parts of it are copied to which places of the live model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.vllm_backend.layers import derives, derives_from_others, holdings, kind_of, unfit
from pitstop.engine.vllm_backend.loader_trace import Fill, Move, trace

if TYPE_CHECKING:
    from pitstop.engine.worker_ports import TensorSpec

LEAST: Final = 0.5
"""A plan that would copy less than this part of a version's bytes is not worth a second way."""


class Refused(Exception):
    """Raised when a model has no plan that is worth having; says why."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a load of one model does, whole: copies, and what each tensor reaches in whatever way.

    Parameters go by their first names. `owners` are the layers that hold a parameter; `kinds` names what may have
    rearranged it after loading, and is empty where nothing could. `derivers` are layers that compute from others'
    parameters after each load.
    """

    moves: Mapping[str, tuple[Move, ...]]
    lands: Mapping[str, frozenset[str]]
    owners: Mapping[str, frozenset[str]]
    kinds: Mapping[str, str]
    derivers: frozenset[str] = frozenset()
    fills: tuple[Fill, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How a version gets into one model of one rank.

    `moves` lists, by tensor, what is copied; a tensor without any is not this rank's. `reloaded` says of all other
    tensors why vLLM has to load them, into the layers `opened`. `unfit` are layers that may not be copied into.
    `fills` is put beside what is copied: memory may have been discarded since a loader did that.
    """

    learned: Learned
    moves: Mapping[str, tuple[Move, ...]]
    reloaded: Mapping[str, str]
    opened: frozenset[str]
    unfit: Mapping[str, str]
    fills: tuple[Fill, ...] = ()

    def without(self, parameters: Mapping[str, str]) -> Plan:
        """Return a plan that leaves some parameters to vLLM, each for a reason."""
        more = {layer: why for name, why in parameters.items() for layer in self.learned.owners[name]}
        return split(self.learned, {**more, **self.unfit})


def split(learned: Learned, unfit: Mapping[str, str]) -> Plan:
    """Divide tensors into those that are copied and those that vLLM loads.

    A tensor that reaches an unfit layer is loaded, and then so is everything else in the layers that it reaches.
    """
    bad, reloaded = dict(unfit), dict[str, str]()
    grown = True
    while grown:
        grown = False
        for name, parameters in learned.lands.items():
            layers = {layer for parameter in parameters for layer in learned.owners[parameter]}
            why = reloaded.get(name) or next((bad[layer] for layer in sorted(layers) if layer in bad), None)
            if why is not None:
                reloaded[name] = why
                for layer in layers - bad.keys():
                    bad[layer] = f"it shares {name} with a layer that cannot be copied into: {why}"
                    grown = True
    opened = {layer for name in reloaded for parameter in learned.lands[name] for layer in learned.owners[parameter]}
    opened |= learned.derivers
    moves = {name: found for name, found in learned.moves.items() if name not in reloaded}
    copied = {move.parameter for found in moves.values() for move in found}
    fills = tuple(fill for fill in learned.fills if fill.parameter in copied)
    return Plan(learned, moves, reloaded, frozenset(opened), bad, fills)


def learn(model: Any, specs: Sequence[TensorSpec], *, cpu: bool, least: float = LEAST) -> Plan:
    """Watch a model's loader and return what it does. Nothing may run the model meanwhile.

    Raises:
        Refused: too much of it is not a plain copy, or the loader could not be watched.
    """
    modules = dict(model.named_modules())
    if callable(getattr(model, "process_weights_after_loading", None)):
        raise Refused(f"{type(model).__name__} derives values from what it loads")
    _worth_a_look(modules, cpu, least)
    try:
        traced = trace(model, specs)
    except Exception as error:
        raise Refused(f"its loader could not be watched: {type(error).__name__}: {error}") from error
    first = traced.first
    loaded: dict[str, int] = {}
    for moves in traced.moves.values():
        for move in moves:
            loaded[move.parameter] = loaded.get(move.parameter, 0) + prod(move.target.size)
    landed = frozenset().union(*traced.lands.values())
    bad = {}
    for prefix, layer in modules.items():
        if not landed.isdisjoint(first.get(full, full) for full in holdings(layer, prefix)):
            why = unfit(layer, prefix, traced, first, loaded, cpu=cpu)
            if why is not None:
                bad[prefix] = why
    bad |= {_layer(name): f"{name} is there only while it loads" for name in traced.passing & landed}
    owners = {base: frozenset(_layer(name) for name in names) for base, names in traced.aliases.items()}
    learned = Learned(
        {name: tuple(found) for name, found in traced.moves.items()},
        {name: frozenset(found) for name, found in traced.lands.items()},
        owners,
        {
            base: " ".join(sorted({kind_of(modules[layer]) for layer in layers} - {""}))
            for base, layers in owners.items()
        },
        frozenset(prefix for prefix, layer in modules.items() if derives_from_others(layer)),
        tuple(traced.fills),
    )
    plan = split(learned, bad)
    nbytes = {spec.name: spec.nbytes for spec in specs}
    if (share := sum(nbytes[name] for name in plan.moves) / max(sum(nbytes.values()), 1)) < least:
        raise Refused(f"only {share:.0%} of a version's bytes are plain copies: {next(iter(plan.reloaded.values()))}")
    return plan


def _worth_a_look(modules: Mapping[str, Any], cpu: bool, least: float) -> None:
    """Refuse without a trace what is plainly not worth one."""
    every, refused, why = 0, 0, ""
    for layer in modules.values():
        nbytes = sum(value.nbytes for value in layer._parameters.values() if value is not None)
        every += nbytes
        if nbytes and (reason := derives(layer, cpu=cpu)) is not None:
            refused, why = refused + nbytes, reason
    if refused > (1 - least) * every:
        raise Refused(why)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
