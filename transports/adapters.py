"""Which low-rank pair belongs to which tensor: PEFT's names and layers read without importing PEFT.

PEFT wraps a layer `home` as `home.base_layer`, keeps its pairs in `home.lora_A.<adapter>` and `home.lora_B.<adapter>`,
and layers that are trained whole in `home.modules_to_save.<adapter>` beside `home.original_module`. Files that it saves
have the same names without the adapter's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import AdapterRejected, hint, names, near
from pitstop.engine.naming import Names, plain

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.transports.sources import ModuleLike

_PAIR: Final = re.compile(r"(?P<home>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.(?P<rest>.+))?")
_SAVED: Final = "modules_to_save"
_ORIGINAL: Final = "original_module"
_DORA: Final = "lora_magnitude_vector"
_FLOATS: Final = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to a tensor of `(rows, columns)`: `scaling * up @ down`, or the transpose of that.

    `up` is PEFT's `lora_B`, `down` its `lora_A`.
    """

    up: Tensor
    down: Tensor
    scaling: float
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        rows, columns = self.up.shape[0], self.down.shape[1]
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to publish, and what is to be added to it."""

    name: str
    tensor: Tensor
    delta: Delta | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that has to be at hand to make it, in a fixed order."""
        return (self.tensor,) if self.delta is None else (self.tensor, self.delta.up, self.delta.down)


@dataclass(frozen=True, slots=True)
class Adapted:
    """Tensors of a model with one adapter, to be merged as they are sent. Give it to `publish` or `refit`."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer says of one adapter. `merged`: its weight holds the adapter already."""

    scaling: float
    fan_in_fan_out: bool = False
    merged: bool = False


@dataclass(slots=True)
class _Pair:
    """The tensors of one adapter at one layer."""

    embedding: bool = False
    up: Tensor | None = None
    down: Tensor | None = None
    odd: list[str] = field(default_factory=list)


def is_adapters(name: str) -> bool:
    """Say whether a tensor of this name is an adapter's, and no model's."""
    return _PAIR.fullmatch(name) is not None or _DORA in name.split(".")


def wraps(model: ModuleLike) -> bool:
    """Say whether a module has layers that PEFT wrapped."""
    walk = getattr(model, "named_modules", None)
    return walk is not None and any(_wrapped(layer) for _, layer in walk())


def merged(model: ModuleLike, *, adapter: str | None = None) -> Adapted:
    """Return a PEFT model's tensors with an adapter to be merged into them; `publish(model)` does it by itself.

    Neither the model nor its adapter is changed. `adapter` names the one to merge where a model has several.

    Raises:
        AdapterRejected: there is no such adapter, or it cannot be merged; names the layer or the tensor.
    """
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if not n.endswith("_extra_state")}
    chosen = _chosen(model, state, adapter)
    layers: dict[str, _Layer] = {}
    for path, layer in model.named_modules():  # type: ignore[attr-defined]
        if _wrapped(layer) and (told := _told(plain(_unrooted(path)), layer, chosen)) is not None:
            layers[plain(_unrooted(path))] = told
    return Adapted(_paired(state.items(), chosen, layers))


def merged_tensors(
    base: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    adapter: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
) -> Adapted:
    """Return a model's tensors with an adapter's to be merged into them, both by name.

    `adapter` has the names of PEFT's `adapter_model.safetensors`, `config` is what its `adapter_config.json` holds: `r`
    and `lora_alpha`, and if need be `use_rslora`, `rank_pattern`, `alpha_pattern`, `fan_in_fan_out`.

    Raises:
        AdapterRejected: the adapter does not fit, or is of a kind that cannot be merged; names the tensor.
    """
    for asked in ("use_dora", "lora_bias"):
        if config.get(asked):
            raise AdapterRejected(f"the adapter has {asked}, which cannot be merged")
    named, given = list(_items(base)), list(_items(adapter))
    whole = {plain(_unrooted(name)): name for name, _ in named}
    saved: dict[str, Tensor] = {}
    for name, tensor in given:
        key = plain(_unrooted(name))
        if is_adapters(key):
            continue
        if key not in whole:
            raise AdapterRejected(
                f"{name} of the adapter belongs to no tensor of the model.{hint({name: near(key, list(whole))})}",
                tensor=name,
            )
        saved[whole[key]] = tensor
    pairs = [(name, tensor) for name, tensor in given if is_adapters(plain(_unrooted(name)))]
    replaced = [(name, _replaced(name, tensor, saved.get(name))) for name, tensor in named]
    homes = {match["home"] for name, _ in pairs if (match := _PAIR.fullmatch(plain(_unrooted(name))))}
    layers = {home: _Layer(_scaling(home, config), bool(config.get("fan_in_fan_out"))) for home in homes}
    return Adapted(_paired([*replaced, *pairs], None, layers))


def called(adapter: Iterable[str], model: Names) -> dict[str, str]:
    """Return which names of the model's tensors an adapter's trainer has other ones for, and which those are."""
    found = {}
    for name in adapter:
        match = _PAIR.fullmatch(plain(_unrooted(name)))
        home = f"{match['home']}.weight" if match else ""
        if home and (spec := model.find(home)) is not None:
            found[spec.name] = home
    return found


def _items(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _wrapped(layer: Any) -> bool:
    return hasattr(layer, "base_layer") or (hasattr(layer, _SAVED) and hasattr(layer, _ORIGINAL))


def _unrooted(name: str) -> str:
    """Strip `base_model.model`, what PEFT puts before every name; wrappers may stand around it."""
    pieces = name.split(".")
    for at in range(len(pieces) - 1):
        if pieces[at : at + 2] == ["base_model", "model"] and not plain(".".join(pieces[:at])):
            return ".".join(pieces[:at] + pieces[at + 2 :])
    return name


def _adapter_of(name: str) -> str | None:
    """Return which adapter a tensor of a model is of; None: none."""
    if (match := _PAIR.fullmatch(name)) is not None:
        return (match["rest"] or "").split(".")[0]
    pieces = name.split(".")
    for mark in (_SAVED, _DORA):
        if mark in pieces[:-1]:
            return pieces[pieces.index(mark) + 1]
    return None


def _chosen(model: Any, state: Mapping[str, Tensor], asked: str | None) -> str:
    there = sorted({adapter for name in state if (adapter := _adapter_of(plain(name))) is not None})
    there = sorted(set(there) | set(getattr(model, "peft_config", None) or ()))
    if asked is None and len(there) == 1:
        return there[0]
    if asked is None:
        raise AdapterRejected(
            f"the model has {len(there)} adapters ({names(there) or 'none that can be merged'}): "
            "publish pitstop.transports.merged(model, adapter=...)"
        )
    if asked not in there:
        raise AdapterRejected(f"the model has no adapter {asked!r}, but {names(there) or 'none'}")
    return asked


def _told(home: str, layer: Any, adapter: str) -> _Layer | None:
    """Return what a wrapped layer says of an adapter; None: it does not have it."""
    why = None
    if getattr(layer, "disable_adapters", False) is True:
        why = "has its adapters disabled"
    elif hasattr(layer, _SAVED):
        return None
    elif not hasattr(layer, "lora_A") or hasattr(layer, "lora_E"):
        why = f"is a {type(layer).__module__}.{type(layer).__name__}, which is no LoRA layer"
    elif getattr(layer, "parameter_name", None) is not None:
        why = f"has an adapter of the parameter {layer.parameter_name}, which cannot be merged yet"
    elif adapter in (getattr(layer, "lora_variant", None) or ()) or adapter in (getattr(layer, _DORA, None) or ()):
        why = "has a variant of LoRA (DoRA or another), which cannot be merged yet"
    elif (getattr(layer, "use_dora", None) or {}).get(adapter):
        why = "has a variant of LoRA (DoRA), which cannot be merged yet"
    elif (getattr(layer, "lora_bias", None) or {}).get(adapter):
        why = "has an adapter with a bias, which cannot be merged yet"
    done = list(getattr(layer, "merged_adapters", None) or ())
    if why is None and done and done != [adapter]:
        why = f"was merged in place with {names(done)}: unmerge it"
    if why is not None:
        raise AdapterRejected(f"{home} {why}", tensor=home)
    scaling = layer.scaling.get(adapter)
    if scaling is None:
        return None
    return _Layer(float(scaling), bool(getattr(layer, "fan_in_fan_out", False)), bool(done))


def _scaling(home: str, config: Mapping[str, Any]) -> float:
    try:
        rank = _pattern(home, config.get("rank_pattern"), config["r"])
        alpha = _pattern(home, config.get("alpha_pattern"), config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    except (KeyError, TypeError, ZeroDivisionError, ValueError) as error:
        raise AdapterRejected(f"the adapter's config gives no scaling of {home}: {error!r}", tensor=home) from None


def _pattern(home: str, patterns: Mapping[str, Any] | None, otherwise: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", home):
            return value
    return otherwise


def _replaced(name: str, tensor: Tensor, saved: Tensor | None) -> Tensor:
    if saved is None:
        return tensor
    if tuple(saved.shape) != tuple(tensor.shape):
        raise AdapterRejected(
            f"{name} is {tuple(tensor.shape)}, and the adapter's own is {tuple(saved.shape)}", tensor=name
        )
    return saved


def _paired(named: Iterable[tuple[str, Tensor]], adapter: str | None, layers: Mapping[str, _Layer]) -> tuple[Part, ...]:
    base: dict[str, tuple[str, Tensor]] = {}
    pairs: dict[str, _Pair] = {}
    saved: dict[str, Tensor] = {}
    for name, tensor in named:
        unrooted = _unrooted(name)
        key = plain(unrooted)
        of = _adapter_of(key)
        match = _PAIR.fullmatch(key)
        if adapter is not None and of not in (None, adapter):
            continue
        if match is not None:
            _put(pairs.setdefault(match["home"], _Pair()), match, name, tensor)
        elif _DORA in key.split("."):
            raise AdapterRejected(f"{name} is of a variant of LoRA (DoRA), which cannot be merged yet", tensor=name)
        elif of is not None:
            saved[key.replace(f".{_SAVED}.{of}.", ".").removeprefix(f"{_SAVED}.{of}.")] = tensor
        else:
            pieces = [piece for piece in unrooted.split(".") if piece not in (_ORIGINAL, "base_layer")]
            kept = ".".join(pieces)
            if plain(kept) in base:
                raise AdapterRejected(f"{name} is there twice", tensor=name)
            base[plain(kept)] = kept, tensor
    for key in saved:
        if key not in base:
            raise AdapterRejected(f"{key} is trained whole, and the model has no such tensor", tensor=key)
    deltas = {f"{home}.weight": _delta(home, pair, layers.get(home)) for home, pair in pairs.items()}
    for key in deltas:
        if key not in base:
            raise AdapterRejected(
                f"{key.removesuffix('.weight')} has an adapter, and the model has no {key}."
                f"{hint({key: near(key, list(base))})}",
                tensor=key,
            )
    parts = []
    for key, (name, tensor) in base.items():
        delta = deltas.get(key)
        if delta is not None:
            _fits(name, tensor, delta)
        parts.append(Part(name, _replaced(name, tensor, saved.get(key)), delta))
    return tuple(parts)


def _put(pair: _Pair, match: re.Match[str], name: str, tensor: Tensor) -> None:
    pair.embedding = pair.embedding or match["embedding"] is not None
    if (match["rest"] or "").split(".")[-1] == "bias":
        pair.odd.append(name)
        return
    side = "down" if match["side"] == "A" else "up"
    if getattr(pair, side) is not None:
        raise AdapterRejected(f"{name} is the second of its kind at {match['home']}: give one adapter", tensor=name)
    setattr(pair, side, tensor)


def _delta(home: str, pair: _Pair, layer: _Layer | None) -> Delta | None:
    up, down, why = pair.up, pair.down, None
    if up is None or down is None:
        there, absent = ("A", "B") if up is None else ("B", "A")
        why = f"has a lora_{there} without its lora_{absent}"
    elif pair.odd:
        why = f"has an adapter with a bias ({names(pair.odd)}), which cannot be merged yet"
    elif layer is None:
        why = "has an adapter, and no layer says how it is scaled"
    elif up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0]:
        why = f"has lora_A of {tuple(down.shape)} and lora_B of {tuple(up.shape)}, which is no pair of matrices"
    elif not math.isfinite(layer.scaling):
        why = f"has an adapter scaled by {layer.scaling}"
    if why is not None or up is None or down is None or layer is None:
        raise AdapterRejected(f"{home} {why}", tensor=home)
    return None if layer.merged else Delta(up, down, layer.scaling, pair.embedding or layer.fan_in_fan_out)


def _fits(name: str, tensor: Tensor, delta: Delta) -> None:
    for what in (tensor, delta.up, delta.down):
        if str(what.dtype).removeprefix("torch.") not in _FLOATS:
            raise AdapterRejected(f"{name} or its adapter is {what.dtype}, to which nothing can be added", tensor=name)
    if tuple(tensor.shape) != delta.shape:
        raise AdapterRejected(f"{name} is {tuple(tensor.shape)}, and its adapter is for {delta.shape}", tensor=name)
