"""What loads a version into one rank's models: the one place that knows which models, and in which way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from pitstop.engine.vllm_backend.planned import PROVES, Knowledge, Live, Planned, Proving
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

    def begin(self) -> None:
        """Open the model."""

    def feed(self, tensors: Sequence[tuple[TensorSpec, Tensor]]) -> None:
        """Load some of the version's tensors, in any order, each once. None is referred to after `finish` or `undo`."""

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


def knowledge_of(model: Module) -> tuple[Knowledge, Live]:
    """Return what this process knows of a model's loader."""
    if model not in _known:
        _known[model] = Knowledge(), Live(model)
    return _known[model]


def loading(worker: Any) -> Loading:
    """Return what loads a version into the models of this rank. `worker` is vLLM's."""
    whole = worker.vllm_config.parallel_config.pipeline_parallel_size == 1
    return loading_of(worker.get_model(), worker.vllm_config, worker.device, whole=whole)


def loading_of(model: Module, config: Any, device: Any, *, whole: bool) -> Loading:
    """Return what loads a version into one model: its plan, if it has a proven one. `config` is vLLM's."""
    knowledge, live = knowledge_of(model)
    plan = knowledge.plan
    if plan is None:
        return Reload(model, config, device, whole, why=knowledge.why)
    if not knowledge.proven:
        return Proving(knowledge, Reload(model, config, device, whole, why=PROVES), live)
    layers = tuple(layer for name, layer in model.named_modules() if name in plan.opened)
    return Planned(plan, Reload(model, config, device, whole, layers) if layers else None, live, device)
