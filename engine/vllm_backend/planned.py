"""Loading by a plan: copies straight into the live parameters, and vLLM's reload for what is not a plain copy.

A plan is proven before it is used: the first version is loaded by vLLM alone, and what the plan says is compared with
what is in the live parameters then, part by part.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import MissingTensors, names
from pitstop.engine.vllm_backend.plan import Plan, Refused, learn
from pitstop.engine.vllm_backend.reload import Reload
from pitstop.engine.vllm_backend.sums import constant, sums
from pitstop.engine.worker_ports import Ways

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.engine.vllm_backend.trace import Move
    from pitstop.engine.worker_ports import TensorSpec

    Tensors = Sequence[tuple[TensorSpec, Tensor]]

PROVES: Final = "the first version after a start proves the load plan"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Knowledge:
    """What is known of one model's loader. `why` says why there is no plan; an unproven one is not used."""

    plan: Plan | None = None
    why: str = "its loader has not been watched"
    proven: bool = False

    def learn(self, model: Any, specs: Sequence[TensorSpec], *, cpu: bool) -> None:
        """Watch a model's loader. Nothing may run the model meanwhile; never raises."""
        self.plan, self.proven = None, False
        try:
            self.plan, self.why = learn(model, specs, cpu=cpu), ""
        except Refused as reason:
            self.why = str(reason)

    def way_of(self, name: str) -> str:
        """Say how the next version's tensor of this name will be loaded: `copied`, or why not."""
        if self.plan is None or not self.proven:
            return self.why or PROVES
        return self.plan.reloaded.get(name, "copied")


class Live:
    """The live parameters of a model by name, as views that a plan's moves go to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._at: dict[str, tuple[int, Tensor]] = {}
        self._views: dict[Move, Tensor] = {}

    def refresh(self) -> None:
        """Look again where the parameters are; one that has moved loses the views of where it was."""
        found = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        at = {name: (value.data_ptr(), value.data) for name, value in found.items()}
        if {name: address for name, (address, _) in at.items()} != {n: address for n, (address, _) in self._at.items()}:
            self._views.clear()
        self._at = at

    def view(self, move: Move) -> Tensor:
        """Return the place that a move goes to."""
        if move not in self._views:
            self._views[move] = move.target.of(self._at[move.parameter][1])
        return self._views[move]


@dataclass(slots=True)
class Proving:
    """Implements `Loading` for the version that a plan is proven by: vLLM loads all of it, and the plan is compared."""

    knowledge: Knowledge
    reload: Reload
    live: Live
    _noted: dict[Move, tuple[int, bool]] = field(default_factory=dict)

    def begin(self) -> None:
        """Open the model."""
        self.live.refresh()
        self._noted.clear()
        self.reload.begin()

    def ready(self, tensors: Tensors) -> None:
        """Do nothing: vLLM has nothing that could be made ready."""

    def forget(self) -> None:
        """Do nothing: nothing was made ready."""

    def feed(self, tensors: Tensors) -> None:
        """Load tensors, and note what the parts of them are that the plan would copy."""
        self.reload.feed(tensors)
        plan = self.knowledge.plan
        if plan is None:
            return
        moves = [(move, tensor) for spec, tensor in tensors for move in plan.moves.get(spec.name, ())]
        parts = [move.source.of(tensor) for move, tensor in moves]
        # As they are when they have arrived: a copy may change the dtype.
        arrived = [part.to(self.live.view(move).dtype) for part, (move, _) in zip(parts, moves, strict=True)]
        for (move, _), number, flat in zip(moves, sums(arrived), constant(arrived), strict=True):
            self._noted[move] = number, flat

    def complete(self) -> None:
        """See `Loading.complete`."""
        self.reload.complete()

    def finish(self) -> None:
        """Do the post-load work, and judge the plan."""
        self.reload.finish()
        self.live.refresh()
        knowledge = self.knowledge
        if knowledge.plan is None:
            return
        if wrong := self._wrong(knowledge.plan):
            _log.warning("the load plan was wrong for %d parameters: %s", len(wrong), names(sorted(wrong)))
            knowledge.plan = knowledge.plan.without(wrong)
        knowledge.proven = True

    def _wrong(self, plan: Plan) -> dict[str, str]:
        """Name the parameters that do not hold what the plan would have put there, or for which that shows nothing."""
        moves = [move for found in plan.moves.values() for move in found]
        here = dict(zip(moves, sums([self.live.view(move) for move in moves]), strict=True))
        kinds, wrong, seen = plan.learned.kinds, dict[str, str](), set[tuple[str, str]]()
        for move in moves:
            number, flat = self._noted.get(move, (None, False))
            if number is None:
                wrong[move.parameter] = "the version that should have proven the plan did not bring it"
            elif number != here[move]:
                wrong[move.parameter] = f"{move.parameter} does not hold {move.tensor} where the plan puts it"
            elif not flat:
                seen.add(_kind(move, kinds))
        for move in moves:
            _, flat = self._noted.get(move, (None, False))
            # All the same number: rearranged, it would look the same.
            if flat and kinds[move.parameter] and _kind(move, kinds) not in seen:
                wrong.setdefault(move.parameter, f"{move.tensor} is all one number, which proves no place")
        return wrong

    def undo(self) -> None:
        """See `Loading.undo`."""
        self._noted.clear()
        self.reload.undo()

    def ways(self) -> Ways:
        """Say how the tensors were loaded."""
        return self.reload.ways()


def _kind(move: Move, kinds: Mapping[str, str]) -> tuple[str, str]:
    return kinds[move.parameter], move.parameter.rpartition(".")[2]


def _current(device: Any) -> Any:
    import torch

    # A receiver's thread has no device until it is told.
    return contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@dataclass(slots=True)
class Planned:
    """Implements `Loading` by a proven plan. `reload` is of the layers that the plan leaves to vLLM."""

    plan: Plan
    reload: Reload | None
    live: Live
    device: Any
    _sources: dict[str, list[Tensor]] = field(default_factory=dict)
    _fed: set[str] = field(default_factory=set)
    _loaded: int = 0

    def begin(self) -> None:
        """Open what vLLM has to load; live bytes may change from here on."""
        self.live.refresh()
        self._fed.clear()
        self._loaded = 0
        if self.reload is not None:
            self.reload.begin()

    def ready(self, tensors: Tensors) -> None:
        """Cut staged tensors into the parts that will be copied, while the replica still serves."""
        for spec, tensor in tensors:
            self._sources[spec.name] = [move.source.of(tensor) for move in self.plan.moves.get(spec.name, ())]

    def forget(self) -> None:
        """Drop what `ready` has made."""
        self._sources.clear()

    def feed(self, tensors: Tensors) -> None:
        """Copy what the plan knows, in one batch, and have vLLM load the rest."""
        import torch

        targets, sources, rest = list[Any](), list[Any](), []
        for spec, tensor in tensors:
            if spec.name not in self.plan.moves:
                rest.append((spec, tensor))
                continue
            moves = self.plan.moves[spec.name]
            self._fed.add(spec.name)
            targets += [self.live.view(move) for move in moves]
            made = self._sources.pop(spec.name) if spec.name in self._sources else None
            sources += [move.source.of(tensor) for move in moves] if made is None else made
        with torch.no_grad(), _current(self.device):
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            if self.device.type != "cpu":
                # Whoever gave the tensors may write over them when this returns.
                torch.get_device_module(self.device).current_stream().synchronize()
        if rest:
            self._loaded += len(rest)
            self._vllm().feed(rest)

    def _vllm(self) -> Reload:
        if self.reload is None:
            raise MissingTensors("a version has tensors that the load plan does not know")
        return self.reload

    def complete(self) -> None:
        """See `Loading.complete`."""
        if absent := self.plan.moves.keys() - self._fed:
            raise MissingTensors(f"{len(absent)} tensors were not loaded: {names(sorted(absent))}", tensor=min(absent))
        if self.reload is not None:
            self.reload.complete()

    def finish(self) -> None:
        """Do vLLM's post-load work on what it has loaded."""
        if self.reload is not None:
            self.reload.finish()

    def undo(self) -> None:
        """See `Loading.undo`. What was copied stays: the parameters never left their places."""
        self._sources.clear()
        if self.reload is not None:
            self.reload.undo()

    def ways(self) -> Ways:
        """Say how the tensors were loaded."""
        why = next(iter(self.plan.reloaded.values()), "")
        return Ways(len(self._fed), self._loaded, why)
