"""What landed for one refit in one worker, and its way into the live model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pitstop.engine.errors import MissingTensors, ProtocolViolation, names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from pitstop.engine.vllm_backend.reload import Reload
    from pitstop.engine.worker_ports import Bucket, TensorSpec, Ticket


class LayerwiseSink:
    """The `WeightSink` of one ticket. `landed` comes from the receiver's thread, all else from the worker's.

    `touched` is True from the moment on at which live bytes may have changed.
    """

    def __init__(self, ticket: Ticket, reload: Reload, tied: Mapping[str, str]) -> None:
        self.touched = False
        self._ticket, self._reload, self._tied = ticket, reload, tied
        self._lock = threading.Lock()
        self._landed: dict[str, tuple[TensorSpec, Tensor]] = {}
        self._released = self._applied = self._finished = False

    def landed(self, bucket: Bucket) -> None:
        """Take over proven tensors. What comes after `release` is dropped."""
        if bucket.refit_id != self._ticket.refit_id:
            raise ProtocolViolation(f"a bucket of refit {bucket.refit_id} came for {self._ticket.refit_id}")
        with self._lock:
            if not self._released:
                self._landed |= {spec.name: (spec, tensor) for spec, tensor in bucket.tensors}

    def apply(self) -> None:
        """Load what landed. Nothing is touched unless all of it did."""
        with self._lock:
            landed = dict(self._landed)
        wanted = {placed.spec.name for placed in self._ticket.tensors}
        if absent := sorted(wanted - landed.keys()):
            raise MissingTensors(f"{len(absent)} tensors have not landed: {names(absent)}", tensor=absent[0])
        if self._applied:
            raise ProtocolViolation(f"refit {self._ticket.refit_id} was applied before")
        tensors = [landed[placed.spec.name] for placed in self._ticket.tensors]
        self.touched = self._applied = True
        self._reload.load(self._untied(tensors))

    def _untied(self, tensors: list[tuple[TensorSpec, Tensor]]) -> list[tuple[TensorSpec, Tensor]]:
        """Send each of two tied tensors once, under the embedding's name: models ignore the head's."""
        from dataclasses import replace

        sent = {spec.name for spec, _ in tensors}
        chosen: list[tuple[TensorSpec, Tensor]] = []
        for spec, tensor in tensors:
            base = self._tied.get(spec.name)
            if base is None:
                chosen.append((spec, tensor))
            elif base not in sent:
                sent.add(base)
                chosen.append((replace(spec, name=base), tensor))
        return chosen

    def finalize(self) -> None:
        """Do the post-load work."""
        if not self._applied or self._finished:
            raise ProtocolViolation(f"refit {self._ticket.refit_id} has nothing to finalize")
        self._reload.finish()
        self._finished = True

    def undo(self) -> None:
        """Make a half-applied model runnable again."""
        if self._applied:
            self._reload.undo()

    def release(self) -> None:
        """Drop every reference to what landed, vLLM's included: a model that is half loaded is undone."""
        with self._lock:
            self._released = True
            self._landed.clear()
        if self._applied and not self._finished:
            self._reload.undo()
