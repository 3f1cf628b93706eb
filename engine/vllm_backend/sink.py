"""What landed for one refit in one worker, and its way into the live model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pitstop.engine.errors import DeadlineExceeded, MissingTensors, PeerLost, ProtocolViolation, names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from threading import Lock

    from torch import Tensor

    from pitstop.engine.vllm_backend.loading import Loading
    from pitstop.engine.worker_ports import Bucket, TensorSpec, Ticket, Ways

    Tensors = Sequence[tuple[TensorSpec, Tensor]]


class LoadingSink:
    """The `WeightSink` of one ticket. `landed` comes from the receiver's thread, all else from the worker's.

    `touched` is True from the moment on at which live bytes may have changed. `busy` is the model's: whoever loads
    or undoes holds it, whichever refit it is for.
    """

    def __init__(self, ticket: Ticket, loading: Loading, tied: Mapping[str, str], busy: Lock) -> None:
        self.touched = False
        self._ticket, self._loading, self._tied, self._busy = ticket, loading, tied, busy
        self._missing = {placed.spec.name for placed in ticket.tensors}
        self._shared: set[str] = set()
        self._kept: dict[str, tuple[TensorSpec, Tensor]] = {}
        self._chosen: Tensors = []
        self._failure: BaseException | None = None
        self._stopped = self._applied = self._whole = self._finished = False

    def landed(self, bucket: Bucket) -> None:
        """Load tensors at once if the ticket says `in_place`, keep them for `apply` if not.

        What comes after `undo` or `release` is dropped.
        """
        if bucket.refit_id != self._ticket.refit_id:
            raise ProtocolViolation(f"a bucket of refit {bucket.refit_id} came for {self._ticket.refit_id}")
        with self._busy:
            if self._stopped:
                return
            self._expected(bucket.tensors)
            if not self._ticket.in_place:
                self._kept |= {spec.name: (spec, tensor) for spec, tensor in bucket.tensors}
                if not self._missing:
                    self._chosen = self._untied([self._kept[placed.spec.name] for placed in self._ticket.tensors])
                    self._loading.ready(self._chosen)
                if self._stopped:
                    # As below: who gave the refit up may not have waited.
                    self._drop()
                return
            try:
                self._load(self._untied(bucket.tensors))
            except BaseException as failure:
                self._stopped, self._failure = True, failure
                raise
            finally:
                if self._stopped:
                    # The worker's thread may have waited for this in vain: then nobody else undoes it.
                    self._loading.undo()

    def _expected(self, tensors: Tensors) -> None:
        strange = []
        for spec, _ in tensors:
            if spec.name in self._missing:
                self._missing.remove(spec.name)
            else:
                strange.append(spec.name)
        if strange:
            raise ProtocolViolation(f"{len(strange)} tensors landed twice or uncalled for: {names(strange)}")

    def places(self) -> Mapping[str, Tensor]:
        """See `WeightSink.places`. Of two tied tensors that both come the second is dropped: they have no place."""
        if not self._ticket.in_place:
            return {}
        named = [(placed.spec, self._tied.get(placed.spec.name, placed.spec.name)) for placed in self._ticket.tensors]
        comes = Counter(name for _, name in named)
        own = {name: spec for spec, name in named if comes[name] == 1}
        with self._held():
            found = self._loading.places([replace(spec, name=name) for name, spec in own.items()])
        return {own[name].name: place for name, place in found.items()}

    def hold(self) -> bool:
        """See `WeightSink.hold`."""
        if not self._busy.acquire(blocking=False):
            return False
        if self._stopped:
            self._busy.release()
            # What was loaded beside it may have failed, which whoever receives has not heard of yet.
            raise self._failure or PeerLost(f"refit {self._ticket.refit_id} was given up here", peer="worker")
        try:
            self._open()
        except BaseException:
            self._stopped = True
            self.let_go()
            raise
        return True

    def let_go(self) -> None:
        """See `WeightSink.let_go`."""
        try:
            if self._stopped:
                # As in `landed`: who gave the refit up may not have waited.
                self._close()
        finally:
            self._busy.release()

    def _open(self) -> None:
        if not self.touched:
            self.touched = True
            self._loading.begin()

    def _load(self, tensors: Tensors) -> None:
        self._open()
        self._loading.feed(tensors)

    def _untied(self, tensors: Tensors) -> Tensors:
        """Load each of two tied tensors once, under the embedding's name: models ignore the head's."""
        chosen: list[tuple[TensorSpec, Tensor]] = []
        for spec, tensor in tensors:
            name = self._tied.get(spec.name, spec.name)
            if name in self._shared:
                continue
            if name in self._tied.values():
                self._shared.add(name)
            chosen.append((replace(spec, name=name), tensor))
        return chosen

    def apply(self) -> None:
        """Load what was kept, and check that the model has all it needs. Nothing is touched if something is absent."""
        with self._held():
            if self._applied or self._stopped:
                raise ProtocolViolation(f"refit {self._ticket.refit_id} was applied before, or given up")
            if self._missing:
                raise MissingTensors(
                    f"{len(self._missing)} tensors have not landed: {names(sorted(self._missing))}",
                    tensor=min(self._missing),
                )
            self._applied = True
            if not self._ticket.in_place:
                self._load(self._chosen)
            self._loading.complete()
            self._whole = True

    def finalize(self) -> None:
        """Do the post-load work."""
        with self._held():
            if not self._whole or self._finished or self._stopped:
                raise ProtocolViolation(f"refit {self._ticket.refit_id} has nothing to finalize")
            self._loading.finish()
            self._finished = True

    def undo(self) -> None:
        """Make a half-loaded model runnable again, and load nothing more."""
        self._stopped = True
        with self._held():
            self._close()

    def release(self) -> None:
        """Drop every reference to what landed, vLLM's included: a model that is half loaded is undone."""
        self._stopped = True
        # A load that does not end now sees `_stopped` when it does.
        with contextlib.suppress(DeadlineExceeded), self._held():
            self._drop()
            self._close()

    def _drop(self) -> None:
        self._failure = None  # its frames may refer to what landed
        self._kept.clear()
        self._chosen = []
        self._loading.forget()

    @property
    def ways(self) -> Ways:
        """How what was loaded got into the model."""
        return self._loading.ways()

    def _close(self) -> None:
        if self.touched and not self._finished:
            self._loading.undo()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        seconds = self._ticket.silence_s
        if not self._busy.acquire(timeout=seconds):
            raise DeadlineExceeded(
                f"rank {self._ticket.rank}: the receiver was still loading after {seconds:g} s",
                phase="receive", peer="receiver", seconds=seconds,
            )  # fmt: skip
        try:
            yield
        finally:
            self._busy.release()
