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

from pitstop.engine.errors import MissingTensors, UnexpectedTensors, names
from pitstop.engine.vllm_backend.copies import Copies, Pair, pair
from pitstop.engine.vllm_backend.plan import Plan, Refused, learn
from pitstop.engine.vllm_backend.reload import Reload
from pitstop.engine.vllm_backend.sums import constant, sums
from pitstop.engine.worker_ports import Ways

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.engine.vllm_backend.loader_trace import Fill, Move
    from pitstop.engine.worker_ports import TensorSpec

    Tensors = Sequence[tuple[TensorSpec, Tensor]]

COPIED: Final = "copied"
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
        except Exception as error:  # noqa: BLE001 - an engine serves, and is refitted, without a plan
            self.why = f"its loader could not be watched: {type(error).__name__}: {error}"
            _log.exception("no load plan was made")

    def way_of(self, name: str) -> str:
        """Say how the next version's tensor of this name will be loaded: `copied`, or why not."""
        if self.plan is None or not self.proven:
            return self.why or PROVES
        return self.plan.reloaded.get(name, COPIED)


class Live:
    """The live parameters of a model, as the places that a plan's moves go to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._at: dict[str, tuple[int, Tensor]] = {}
        self._held: list[tuple[dict[str, Any], str, int]] = []
        self._pairs: dict[str, list[Pair]] = {}
        self.moved = 0  #: how often parameters were found elsewhere than before

    def refresh(self) -> None:
        """Look again where the parameters are; pairs with where they were are dropped."""
        self._held = [
            (holder, name, _address(value))
            for _, layer in self._model.named_modules()
            for holder in (layer._parameters, layer._buffers)
            for name, value in holder.items()
        ]
        found = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        at = {name: (value.data_ptr(), value.data) for name, value in found.items()}
        if [*((n, address) for n, (address, _) in at.items())] != [*((n, a) for n, (a, _) in self._at.items())]:
            self.moved += 1
            self._pairs.clear()
            self._at = at

    def check(self) -> None:
        """`refresh`, unless all parameters are where they were, in the modules that there were."""
        # Going through a model takes milliseconds, of which each is one without a token.
        if any(_address(holder.get(name)) != address for holder, name, address in self._held):
            self.refresh()

    def pairs(self, name: str, moves: Sequence[Move]) -> list[Pair]:
        """Return what goes where, by the moves of one tensor."""
        if name not in self._pairs:
            self._pairs[name] = [pair(move.target.of(self._at[move.parameter][1]), move.source) for move in moves]
        return self._pairs[name]

    def fill(self, fills: Sequence[Fill]) -> None:
        """Fill what loaders fill."""
        for fill in fills:
            fill.target.of(self._at[fill.parameter][1]).fill_(fill.value)


def _address(value: Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()


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

    def places(self, tensors: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """Return none: what proves a plan must not come by it."""
        return self.reload.places(tensors)

    def ready(self, tensors: Tensors) -> None:
        """Do nothing: vLLM has nothing that could be made ready."""

    def forget(self) -> None:
        """Do nothing: nothing was made ready."""

    def feed(self, tensors: Tensors) -> None:
        """Load tensors, and note what the parts of them are that the plan would copy."""
        # First: a loader may write to what it is given.
        self._note(tensors)
        self.reload.feed(tensors)

    def _note(self, tensors: Tensors) -> None:
        plan = self.knowledge.plan
        if plan is None:
            return
        moves, arrived = list[Any](), list[Any]()
        for spec, tensor in tensors:
            found = plan.moves.get(spec.name, ())
            moves += found
            # As they are when they have arrived: a copy may change the dtype.
            arrived += [one.part.of(tensor).to(one.place.dtype) for one in self.live.pairs(spec.name, found)]
        for move, number, flat in zip(moves, sums(arrived), constant(arrived), strict=True):
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
        places = [one.place for name, found in plan.moves.items() for one in self.live.pairs(name, found)]
        here = dict(zip(moves, sums(places), strict=True))
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one `feed` does. `moved` is where the live parameters were taken to be: see `Live.moved`.

    `straight` tensors lie at their places already.
    """

    tensors: Tensors
    names: frozenset[str]
    copies: Copies
    rest: list[tuple[TensorSpec, Tensor]]
    moved: int
    straight: int


@dataclass(slots=True)
class Planned:
    """Implements `Loading` by a proven plan. `reload` is of the layers that the plan leaves to vLLM."""

    plan: Plan
    reload: Reload | None
    live: Live
    device: Any
    _ready: _Batch | None = None
    _spent: _Batch | None = None
    _fed: set[str] = field(default_factory=set)
    _strange: list[str] = field(default_factory=list)
    _straight: int = 0
    _placed: bool = False

    def begin(self) -> None:
        """Open what vLLM has to load; live bytes may change from here on."""
        import torch

        if self._ready is not None:
            self.live.check()
        else:
            self.live.refresh()
        self._fed.clear()
        self._strange.clear()
        self._straight = 0
        if self._placed and self.device.type != "cpu":
            # They are written to on a stream that does not wait for what the model's still reads.
            torch.get_device_module(self.device).synchronize(self.device)
        if self.reload is not None:
            self.reload.begin()
        with torch.no_grad(), _current(self.device):
            self.live.fill(self.plan.fills)

    def places(self, tensors: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """Return the places of tensors that are copied whole, as they are, into one piece of memory."""
        self._placed = True
        self.live.refresh()
        found = {}
        for spec in tensors:
            moves = self.plan.moves.get(spec.name, ())
            if len(moves) == 1 and moves[0].whole(spec.shape):
                ((place, *_),) = self.live.pairs(spec.name, moves)
                if str(place.dtype) == f"torch.{spec.dtype}":
                    found[spec.name] = place.view(spec.shape)
        return found

    def ready(self, tensors: Tensors) -> None:
        """Pair parts of staged tensors with their places, while the replica still serves: that takes longer than the
        copies do, where there are thousands."""
        self.live.refresh()
        self._ready = self._batch(tensors)

    def forget(self) -> None:
        """Drop what `ready` has made."""
        self._ready = self._spent = None

    def _batch(self, tensors: Tensors) -> _Batch:
        work, rest, fed, straight = [], [], set(), 0
        for spec, tensor in tensors:
            moves = self.plan.moves.get(spec.name)
            if moves is None:
                rest.append((spec, tensor))
                continue
            fed.add(spec.name)
            pairs = self.live.pairs(spec.name, moves)
            if len(pairs) == 1 and pairs[0].address == tensor.data_ptr() and tensor.numel():
                straight += 1
            else:
                work.append((tensor, pairs))
        with _current(self.device):
            copies = Copies(work, self.device)
        return _Batch(tensors, frozenset(fed), copies, rest, self.live.moved, straight)

    def feed(self, tensors: Tensors) -> None:
        """Copy what the plan knows, in one batch, and have vLLM load the rest."""
        import torch

        batch, self._ready = self._ready, None
        if batch is None or batch.tensors is not tensors or batch.moved != self.live.moved:
            batch = self._batch(tensors)
        else:
            # What may be thousands of views is not dropped while nothing is served.
            self._spent = batch
        with torch.no_grad(), _current(self.device):
            batch.copies.run()
            if self.device.type != "cpu":
                # Whoever gave the tensors may write over them when this returns.
                torch.get_device_module(self.device).current_stream().synchronize()
        self._fed |= batch.names
        self._straight += batch.straight
        if batch.rest and self.reload is not None:
            self.reload.feed(batch.rest)
        elif batch.rest:
            self._strange += [spec.name for spec, _ in batch.rest]

    def complete(self) -> None:
        """See `Loading.complete`."""
        if self._strange:
            raise UnexpectedTensors(
                f"{len(self._strange)} tensors are not of this model: {names(self._strange)}",
                tensor=min(self._strange),
            )
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
        self.forget()
        if self.reload is not None:
            self.reload.undo()

    def ways(self) -> Ways:
        """Say how the tensors were loaded."""
        reloaded = 0 if self.reload is None else self.reload.ways().reloaded
        return Ways(len(self._fed), reloaded, next(iter(self.plan.reloaded.values()), ""), self._straight)
