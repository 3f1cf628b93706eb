"""What loads a version into one rank's models: the one place that knows which models, and in which way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pitstop.engine.vllm_backend.drafter import Router, Together, asked_for, draft_config, draft_model, fill
from pitstop.engine.vllm_backend.fingerprint import fingerprint
from pitstop.engine.vllm_backend.reload import Reload

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.engine.worker_ports import TensorSpec


class Loading(Protocol):
    """One load of one version. One call at a time, from any thread.

    From `begin` on the model is torn, until `finish` has returned or `undo` has made it runnable again.
    """

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


def loading(worker: Any) -> Loading:
    """Return what loads a version into the models of this rank. `worker` is vLLM's."""
    whole = worker.vllm_config.parallel_config.pipeline_parallel_size == 1
    target = _one(worker, worker.get_model(), worker.vllm_config, whole=whole)
    draft = asked_for(worker)
    if draft is None or not draft.trained:
        return target
    model = draft_model(worker)
    drafter = None if model is None else _one(worker, model, draft_config(worker), whole=True)
    return Together(target, drafter, Router(draft, model))


def _one(worker: Any, model: Any, config: Any, *, whole: bool) -> Loading:
    return Reload(model, config, worker.device, whole)


def fill_drafter(worker: Any) -> None:
    """Load this rank's frozen drafter from its checkpoint.

    Raises:
        CheckpointUnreadable: the checkpoint does not hold it.
    """
    draft, model = asked_for(worker), draft_model(worker)
    if draft is not None and model is not None:
        fill(_one(worker, model, draft_config(worker), whole=True), Router(draft, model))


def fingerprints(worker: Any) -> dict[str, str]:
    """Say what the live models of this rank hold. A drafter's names begin with `draft.`; what it shares is left out."""
    found = fingerprint(worker.get_model())
    if (model := draft_model(worker)) is not None:
        found |= {f"draft.{name}": value for name, value in fingerprint(model).items()}
    return found
