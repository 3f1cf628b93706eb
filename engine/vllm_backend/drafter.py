"""A worker's drafter: which of a version's tensors it gets, how they are loaded with the target's, and alone.

vLLM keeps a drafter beside its target, and gives it the target's own modules where it has none, or had the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pitstop.engine.errors import TiedTensorsDiffer
from pitstop.engine.vllm_backend.draft_inventory import PREFIX, Draft, tensors_of
from pitstop.engine.worker_ports import Ways

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.vllm_backend.loading import Loading
    from pitstop.engine.worker_ports import TensorSpec

    Tensors = Sequence[tuple[TensorSpec, Tensor]]

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_MTP_HEAD = "shared_head.head.weight"
_INCOMPLETE = "weights missing from checkpoint"


def asked_for(worker: Any) -> Draft | None:
    """Return what the launch said of this worker's drafter."""
    extra = worker.vllm_config.additional_config
    said = extra.get("pitstop", {}).get("drafter") if isinstance(extra, dict) else None
    return Draft(**said) if said else None


def draft_model(worker: Any) -> DraftModel | None:
    """Return the drafter of this rank; None if there is none, or it is on another rank, or has no weights."""
    from torch.nn import Module

    runner = worker.model_runner
    model: Any
    if callable(getattr(runner, "get_draft_model", None)):
        model = runner.get_draft_model()
    else:
        model = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
        model = model.unwrap() if hasattr(model, "unwrap") else model
    if not isinstance(model, Module):
        return None
    shared = {id(module) for module in worker.get_model().modules()}
    return DraftModel(model, {id(module) for module in model.modules()} & shared)


def draft_config(worker: Any) -> Any:
    """Return vLLM's configuration with the drafter in the model's place."""
    config = copy.copy(worker.vllm_config)
    config.model_config = config.speculative_config.draft_model_config
    return config


class DraftModel:
    """A drafter without the modules that are the target's, which are loaded, packed and compared with the target."""

    def __init__(self, model: Module, shared: set[int]) -> None:
        self.whole, self._shared = model, shared

    def modules(self) -> Iterator[Module]:
        """See `Module.modules`."""
        return (module for _, module in self.named_modules())

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """See `Module.named_modules`."""
        return ((name, module) for name, module in self.whole.named_modules() if id(module) not in self._shared)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Module.named_parameters`."""
        for prefix, module in self.named_modules():
            for name, value in module.named_parameters(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, value

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See `Module.named_buffers`."""
        for prefix, module in self.named_modules():
            for name, value in module.named_buffers(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, value

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Have it load some of its tensors. Whether they are all is for `Loading.complete` to say."""
        model: Any = self.whole
        with _in_parts():
            return model.load_weights(weights)
        return None

    def borrowed(self, suffix: str) -> Module | None:
        """Return the target's module that has the place of the drafter's embedding or head."""
        path = suffix.removesuffix(".weight")
        module: Module
        for name, module in self.whole.named_modules(remove_duplicate=False):
            if id(module) in self._shared and (name == path or name.endswith(f".{path}")):
                return module
        return None


def with_drafter(worker: Any) -> Module | WithDrafter:
    """Return the live models of a rank as one, to look at."""
    target, model = worker.get_model(), draft_model(worker)
    return target if model is None else WithDrafter(target, model)


class WithDrafter:
    """A target and its drafter. The drafter's names begin with `draft.`; what it shares is the target's."""

    def __init__(self, target: Module, drafter: DraftModel) -> None:
        self._target, self._drafter = target, drafter

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """See `Module.named_modules`."""
        yield from self._target.named_modules()
        yield from ((f"{PREFIX}{name}" if name else PREFIX[:-1], one) for name, one in self._drafter.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Module.named_parameters`."""
        yield from self._target.named_parameters()
        yield from ((f"{PREFIX}{name}", value) for name, value in self._drafter.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """See `Module.named_buffers`."""
        yield from self._target.named_buffers()
        yield from ((f"{PREFIX}{name}", value) for name, value in self._drafter.named_buffers())


@contextlib.contextmanager
def _in_parts() -> Iterator[None]:
    # Of a drafter of several layers vLLM wants to see each in every call; where that cannot be turned off, it is said
    # when all that was given has been loaded.
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        try:
            yield
        except ValueError as error:
            if _INCOMPLETE not in str(error):
                raise
        return
    with disable_mtp_completeness_check():
        yield


@dataclass(frozen=True, slots=True)
class Router:
    """Says which model takes a tensor, and as what. `model` is None on a rank without a drafter."""

    draft: Draft
    model: DraftModel | None

    def target(self, name: str) -> str | None:
        """What it is to the target."""
        return None if self.draft.takes(name) else name

    def drafter(self, name: str) -> str | None:
        """What it is to the drafter. What is shared is the target's to load."""
        if self.model is None:
            return None
        if not self.draft.takes(name):
            # Draft layers work with the target's embedding and head also where they have copies of them.
            both = not self.draft.own and name.endswith((_EMBEDDING, _HEAD))
            return name if both and self.model.borrowed(_suffix(name)) is None else None
        own = name.removeprefix(PREFIX) if self.draft.own else name
        return None if self.borrowed(name) is not None else own

    def borrowed(self, name: str) -> Module | None:
        """Return the target's module that a tensor of the drafter's would have gone into."""
        if self.model is None or not self.draft.takes(name):
            return None
        suffix = _suffix(name)
        return self.model.borrowed(suffix) if suffix else None


def _suffix(name: str) -> str:
    return next((s for s in (_EMBEDDING, _HEAD, _MTP_HEAD) if name == s or name.endswith(f".{s}")), "")


class Together:
    """The `Loading` of a target and its trained drafter: both, or neither."""

    def __init__(self, target: Loading, drafter: Loading | None, router: Router) -> None:
        self._target, self._drafter, self._router = target, drafter, router
        self._models = [target] if drafter is None else [target, drafter]
        self._copies: list[tuple[TensorSpec, Tensor]] = []
        self._ready: tuple[Tensors, list[tuple[Loading, Tensors]]] | None = None

    def places(self, tensors: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """See `Loading.places`. What goes into both models has two places, and so none; nor has a copy to compare."""
        places, goes = dict[str, Any](), Counter[str]()
        for model, name_of in self._routes():
            own = {name: spec for spec in tensors if (name := name_of(spec.name)) is not None}
            goes.update(spec.name for spec in own.values())
            found = model.places([replace(spec, name=name) for name, spec in own.items()])
            places |= {own[name].name: place for name, place in found.items()}
        return {n: place for n, place in places.items() if goes[n] == 1 and self._router.borrowed(n) is None}

    def _routes(self) -> Iterator[tuple[Loading, Callable[[str], str | None]]]:
        for model, name_of in ((self._target, self._router.target), (self._drafter, self._router.drafter)):
            if model is not None:
                yield model, name_of

    def ready(self, tensors: Tensors) -> None:
        """See `Loading.ready`."""
        self._ready = tensors, self._parted(tensors)
        for model, mine in self._ready[1]:
            model.ready(mine)

    def forget(self) -> None:
        """See `Loading.forget`."""
        self._ready = None
        for model in self._models:
            model.forget()

    def begin(self) -> None:
        """See `Loading.begin`."""
        self._copies.clear()
        for model in self._models:
            model.begin()

    def feed(self, tensors: Tensors) -> None:
        """See `Loading.feed`."""
        self._copies += [(spec, tensor) for spec, tensor in tensors if self._router.borrowed(spec.name) is not None]
        ready, self._ready = self._ready, None
        for model, mine in ready[1] if ready is not None and ready[0] is tensors else self._parted(tensors):
            if mine:
                model.feed(mine)

    def _parted(self, tensors: Tensors) -> list[tuple[Loading, Tensors]]:
        parts: list[tuple[Loading, Tensors]] = []
        for model, name_of in self._routes():
            named = ((name_of(spec.name), spec, tensor) for spec, tensor in tensors)
            parts.append((model, [(replace(spec, name=n), tensor) for n, spec, tensor in named if n is not None]))
        return parts

    def complete(self) -> None:
        """See `Loading.complete`."""
        for model in self._models:
            model.complete()

    def finish(self) -> None:
        """See `Loading.finish`.

        Raises:
            TiedTensorsDiffer: the drafter was sent another embedding or head than the target's, whose memory it has.
        """
        for model in self._models:
            model.finish()
        copies, self._copies = self._copies, []
        for spec, tensor in copies:
            module = self._router.borrowed(spec.name)
            if module is not None and not _holds(module, tensor):
                raise TiedTensorsDiffer(
                    f"{spec.name} is not what the target has: they were equal at the launch, and vLLM keeps such "
                    "tensors once. Launch from checkpoints in which they differ",
                    tensor=spec.name,
                )

    def ways(self) -> Ways:
        """See `Loading.ways`. A tensor that goes into both models counts twice."""
        found = [model.ways() for model in self._models]
        why = next((ways.why for ways in found if ways.why), "")
        copied, reloaded = sum(ways.copied for ways in found), sum(ways.reloaded for ways in found)
        return Ways(copied, reloaded, why, sum(ways.straight for ways in found))

    def undo(self) -> None:
        """See `Loading.undo`."""
        self._copies.clear()
        with contextlib.ExitStack() as both:
            for model in self._models:
                both.callback(model.undo)


def _holds(module: Any, tensor: Tensor) -> bool:
    """Say whether this rank's rows of a vocabulary hold what a checkpoint's tensor does."""
    import torch

    weight, rows = module.weight, module.shard_indices
    sent = tensor[rows.org_vocab_start_index : rows.org_vocab_end_index]
    return bool(torch.equal(weight[: sent.shape[0]], sent.to(weight.device, weight.dtype)))


def fill(loading: Loading, router: Router) -> None:
    """Load a frozen drafter from its checkpoint, of which only the files that hold it are opened.

    Raises:
        CheckpointUnreadable: they do not hold it.
    """
    from safetensors import safe_open

    from pitstop.engine.worker_ports import TensorSpec

    draft = router.draft
    loading.begin()
    try:
        for path, names in tensors_of(draft).items():
            with safe_open(path, "pt") as file:
                for name in names:
                    own = router.drafter(f"{PREFIX}{name}" if draft.own else name)
                    if own is not None:
                        tensor = file.get_tensor(name)
                        dtype = str(tensor.dtype).removeprefix("torch.")
                        loading.feed([(TensorSpec(own, dtype, tuple(tensor.shape)), tensor)])
        loading.complete()
        loading.finish()
    except BaseException:
        loading.undo()
        raise
