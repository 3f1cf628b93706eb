"""What can be published: named tensors, a mapping of them, a module, or a checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pitstop.engine.errors import AdapterRejected, InvalidRequest
from pitstop.transports.adapters import Adapted, Part, is_adapters, merged, wraps
from pitstop.transports.checkpoint_source import CheckpointSource
from pitstop.transports.gathering import gathered
from pitstop.transports.merging import MergedSource
from pitstop.transports.packing import Source
from pitstop.transports.tensor_source import TensorSource, spread

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CheckpointSource", "ModuleLike", "Publishable", "TensorSource", "device_of", "source_of"]


@runtime_checkable
class ModuleLike(Protocol):
    """A torch module, as far as publishing needs it."""

    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Any]:
        """Return parameters and persistent buffers by name."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Return parameters by name."""


Publishable = (
    Mapping[str, "Tensor"] | Iterable[tuple[str, "Tensor"]] | ModuleLike | str | os.PathLike[str] | Source | Adapted
)


def source_of(what: Publishable, *, keep: bool = True) -> Source:
    """Return what to read from. A path is opened and its headers read; an iterable is run through once.

    A module gives its parameters and persistent buffers, the tensors that its checkpoint would have; one that PEFT has
    wrapped gives them with its adapter merged in. DTensors are gathered, here and now, on every rank; `keep` says that
    this rank is the one that sends them.

    Raises:
        OfferRejected: something in it is not a tensor that can be sent; names it.
        AdapterRejected: an adapter that cannot be merged.
        PublishOrder: the ranks have not come with the same tensors.
        CheckpointUnreadable: the folder is absent, incomplete or half-written.
        InvalidRequest: it is none of these.
    """
    if isinstance(what, Source):
        return what
    if isinstance(what, str | os.PathLike):
        return CheckpointSource(what)
    parts = _parts(what)
    if any(spread(tensor) for part in parts for tensor in part.tensors()):
        return gathered(parts, keep=keep)
    if any(part.delta is not None for part in parts):
        return MergedSource(parts)
    return TensorSource((part.name, part.tensor) for part in parts)


def device_of(source: Source) -> str:
    """Return the one GPU on which all tensors of a source lie, as `cuda:<uuid>`; empty if they do not."""
    return str(getattr(source, "device", ""))


def _parts(what: Any) -> list[Part]:
    if isinstance(what, Adapted):
        return list(what.parts)
    if isinstance(what, Mapping):
        named: Iterable[tuple[str, Any]] = what.items()
    elif isinstance(what, ModuleLike):
        if wraps(what):
            return list(merged(what).parts)
        state = what.state_dict(keep_vars=True)
        named = ((name, value) for name, value in state.items() if not name.endswith("_extra_state"))
    elif isinstance(what, Iterable):
        named = what
    else:
        raise InvalidRequest(f"{type(what).__name__} is neither named tensors, nor a module, nor a path, nor a source")
    parts = [Part(name, value) for name, value in named]
    for part in parts:
        if is_adapters(str(part.name)):
            raise AdapterRejected(
                f"{part.name} is an adapter's: publish the model itself, or "
                "pitstop.transports.merged_tensors(base, adapter, config)",
                tensor=str(part.name),
            )
    return parts
