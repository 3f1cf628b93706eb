"""What loads a version into one rank's models: the one place that knows which models, and in which way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from pitstop.engine.vllm_backend.copies import prepare
from pitstop.engine.vllm_backend.drafter import Router, Together, asked_for, draft_config, draft_model, fill
from pitstop.engine.vllm_backend.planned import COPIED, PROVES, Knowledge, Live, Planned, Proving
from pitstop.engine.vllm_backend.reload import Reload

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.worker_ports import TensorSpec, Ways


class Loading(Protocol):
    """One load of one version. One call at a time, from any thread.

    From `begin` on the model is torn, until `finish` has returned or `undo` has made it runnable again.
    """

    def ready(self, tensors: Sequence[tuple[TensorSpec, Tensor]]) -> None:
        """Prepare for tensors that will be fed, while the model still runs. Nothing live changes."""

    def forget(self) -> None:
        """Drop what `ready` has made."""

    def places(self, tensors: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """Return the live memory of those that may be written straight into it, by name. Nothing live changes.

        A tensor that lies there already when it is fed is where it should be.
        """

    def begin(self) -> None:
        """Open the model."""

    def feed(self, tensors: Sequence[tuple[TensorSpec, Tensor]]) -> None:
        """Load some of the version's tensors, in any order, each once.

        None is referred to after `undo`, or after `finish`, and `forget` if they had been made `ready`.
        """

    def complete(self) -> None:
        """Check that a whole version has been fed.

        Raises:
            UnexpectedTensors: the model has no use for some of them.
            MissingTensors: a part of the model did not get all that it is made of.
        """

    def finish(self) -> None:
        """Do the post-load work."""

    def undo(self) -> None:
        """Make a half-loaded model runnable again, in part with new weights. Idempotent."""

    def ways(self) -> Ways:
        """Say how what was fed got into the model."""


_known: WeakKeyDictionary[Module, tuple[Knowledge, Live]] = WeakKeyDictionary()


def knowledge_of(model: Any) -> tuple[Knowledge, Live]:
    """Return what this process knows of the loader of a model (or of a `DraftModel`, which is made for each use)."""
    key = getattr(model, "whole", model)
    if key not in _known:
        _known[key] = Knowledge(), Live(model)
    return _known[key]


def loading(worker: Any) -> Loading:
    """Return what loads a version into the models of this rank. `worker` is vLLM's."""
    whole = worker.vllm_config.parallel_config.pipeline_parallel_size == 1
    target = _one(worker.get_model(), worker.vllm_config, worker.device, whole=whole)
    draft = asked_for(worker)
    if draft is None or not draft.trained:
        return target
    model = draft_model(worker)
    drafter = None if model is None else _one(model, draft_config(worker), worker.device, whole=True)
    return Together(target, drafter, Router(draft, model))


def _one(model: Any, config: Any, device: Any, *, whole: bool) -> Loading:
    knowledge, live = knowledge_of(model)
    plan = knowledge.plan
    if plan is None:
        return Reload(model, config, device, whole, why=knowledge.why)
    if not knowledge.proven:
        return Proving(knowledge, Reload(model, config, device, whole, why=PROVES), live)
    layers = tuple(layer for name, layer in model.named_modules() if name in plan.opened)
    return Planned(plan, Reload(model, config, device, whole, layers) if layers else None, live, device)


def learn(worker: Any, specs: Sequence[TensorSpec]) -> None:
    """Watch the loaders of this rank's models. Nothing may run them meanwhile; that there is no plan is no error."""
    cpu = worker.device.type == "cpu"
    prepare(worker.device)
    for model, config, mine in _models(worker, specs):
        with set_current_config(config):
            knowledge_of(model)[0].learn(model, list(mine.values()), cpu=cpu)


def ways(worker: Any, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Say of each tensor how it will be loaded: "copied", or why not. What goes into two models has the worse way."""
    found: dict[str, str] = {}
    for model, _, mine in _models(worker, specs):
        knowledge, _ = knowledge_of(model)
        for name, spec in mine.items():
            if found.get(name, COPIED) == COPIED:
                found[name] = knowledge.way_of(spec.name)
    return found


def _models(worker: Any, specs: Sequence[TensorSpec]) -> Iterator[tuple[Any, Any, dict[str, TensorSpec]]]:
    """Yield each model, its configuration, and what it gets: under its own names, by those of the offer."""
    draft, model = asked_for(worker), draft_model(worker)
    router = None if draft is None or not draft.trained else Router(draft, model)
    for one, config, name_of in (
        (worker.get_model(), worker.vllm_config, router.target if router else str),
        (model, draft_config(worker) if router else None, router.drafter if router else None),
    ):
        if one is not None and name_of is not None:
            named = {spec.name: (name_of(spec.name), spec) for spec in specs}
            yield one, config, {n: replace(spec, name=own) for n, (own, spec) in named.items() if own is not None}


def set_current_config(config: Any) -> Any:
    """Return vLLM's context in which its loaders find their configuration."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)


def fill_drafter(worker: Any) -> None:
    """Load this rank's frozen drafter from its checkpoint.

    Raises:
        CheckpointUnreadable: the checkpoint does not hold it.
    """
    draft = asked_for(worker)
    model: Any = draft_model(worker)
    if draft is not None and model is not None:
        # Not by a plan: this is no version, and proves none.
        fill(Reload(model, draft_config(worker), worker.device, whole=True), Router(draft, model))
