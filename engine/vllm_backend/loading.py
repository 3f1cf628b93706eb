"""What loads a version into one rank's models: the one place that knows which models, and in which way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

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
    return Reload(worker.get_model(), worker.vllm_config, worker.device, whole)
