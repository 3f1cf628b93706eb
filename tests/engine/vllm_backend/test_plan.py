"""What watching a loader finds out, on small loaders that do what models' loaders do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pitstop.engine.vllm_backend.loader_trace import Move, View
from pitstop.engine.vllm_backend.plan import Plan, Refused, learn
from pitstop.engine.vllm_backend.planned import Knowledge, Live, Planned, Proving
from pitstop.engine.worker_ports import TensorSpec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

Loader = Callable[[Any, str, Tensor], None]


class Toy(nn.Module):
    """Two layers, and a loader that is called for one tensor after the other."""

    def __init__(self, load: Loader) -> None:
        super().__init__()
        self.one: Any = nn.Module()
        self.two: Any = nn.Module()
        self.one.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.two.weight = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.two.register_buffer("seen", torch.zeros(3))
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(self, name, tensor)


def to_two(model: Any, name: str, tensor: Tensor) -> None:
    if name == "b":
        model.two.weight.data.copy_(tensor)


def made(content: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in content.items()]


def content(seed: int = 0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(4, 6, generator=chance), "b": torch.randn(8, generator=chance)}


def replay(model: Toy, plan: Plan, tensors: dict[str, Tensor]) -> None:
    live = Live(model)
    live.refresh()
    for name, moves in plan.moves.items():
        for one in live.pairs(name, moves):
            one.place.copy_(one.part.of(tensors[name]))


def state(model: nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in model.state_dict().values()]


def whole(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(tensor)
    to_two(model, name, tensor)


def rows(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        for n, part in enumerate(tensor.chunk(2)):
            model.one.weight.data.narrow(0, 2 - 2 * n, 2).copy_(part)
    to_two(model, name, tensor)


def columns(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data[:, ::2].copy_(tensor[:, 3:])
        model.one.weight.data[:, 1::2].copy_(tensor.narrow(1, 0, 3))
    to_two(model, name, tensor)


def turned(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(tensor.reshape(6, 4).t())
    to_two(model, name, tensor)


def by_index(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        for row in range(4):
            model.one.weight.data[row] = tensor[3 - row]
    to_two(model, name, tensor)


@pytest.mark.parametrize("load", [whole, rows, columns, turned, by_index])
def test_what_is_replayed_is_what_the_loader_makes(load: Loader) -> None:
    model, other = Toy(load), Toy(load)
    before = state(model)
    plan = learn(model, made(content()), cpu=False)
    assert state(model) == before
    assert plan.reloaded == {}
    for seed in range(2):
        replay(model, plan, content(seed))
        other.load_weights(content(seed).items())
        assert state(model) == state(other)


def test_a_loader_that_collects_before_it_loads_is_followed() -> None:
    class Collecting(Toy):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            found = dict(weights)
            self.two.weight.data.copy_(found["b"])
            self.one.weight.data.copy_(found["a"])

    model = Collecting(whole)
    replay(model, learn(model, made(content()), cpu=False), content())
    assert torch.equal(model.one.weight, content()["a"])
    assert torch.equal(model.two.weight, content()["b"])


def test_a_cast_on_the_way_is_a_copy() -> None:
    model, sent = Toy(whole), {name: tensor.to(torch.bfloat16) for name, tensor in content().items()}
    replay(model, learn(model, made(sent), cpu=False), sent)
    assert torch.equal(model.one.weight, sent["a"].float())


def scaled(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(-torch.exp(tensor))
    to_two(model, name, tensor)


def joined(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(torch.cat([tensor[2:], tensor[:2]]))
    to_two(model, name, tensor)


def spread(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(tensor[0])
    to_two(model, name, tensor)


def added(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(tensor)
        model.one.weight.data.add_(1)
    to_two(model, name, tensor)


def rebound(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data = tensor
    to_two(model, name, tensor)


def replaced(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight = nn.Parameter(tensor, requires_grad=False)
    to_two(model, name, tensor)


def half(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data[:2].copy_(tensor[:2])
    to_two(model, name, tensor)


def twice(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        for n in range(2):
            model.one.weight.data.copy_(tensor if n else tensor.flip(0))
    to_two(model, name, tensor)


def by_the_way(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        there = torch.empty(4, 6, device=tensor.device)
        there.copy_(tensor)
        model.one.weight.data.copy_(there)
    to_two(model, name, tensor)


def doubled_where_it_is(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(tensor.mul_(2))
    to_two(model, name, tensor)


def emptied_where_it_is(model: Any, name: str, tensor: Tensor) -> None:
    """As loaders do with a bias on all ranks but the first."""
    if name == "a":
        model.one.weight.data.copy_(tensor.zero_())
    to_two(model, name, tensor)


def overwritten(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        tensor[:2].copy_(tensor[2:])
        model.one.weight.data.copy_(tensor)
    to_two(model, name, tensor)


def read_as_another_type(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.copy_(tensor.view(torch.int32))
    to_two(model, name, tensor)


def written_as_another_type(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.view(torch.int32).copy_(tensor)
    to_two(model, name, tensor)


def given_to_write_to(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        torch.mul(tensor, 2, out=model.one.weight.data)
    to_two(model, name, tensor)


def filled(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        model.one.weight.data.fill_(tensor[0, 0])
    to_two(model, name, tensor)


def in_a_list(model: Any, name: str, tensor: Tensor) -> None:
    if name == "a":
        torch._foreach_copy_([model.one.weight.data], [tensor])
    to_two(model, name, tensor)


@pytest.mark.parametrize(
    "load",
    [
        scaled, joined, spread, added, rebound, replaced, half, twice, by_the_way, doubled_where_it_is,
        emptied_where_it_is, overwritten, read_as_another_type, written_as_another_type,
        given_to_write_to, in_a_list, filled,
    ],
)  # fmt: skip
def test_what_is_not_a_plain_copy_of_a_whole_layer_is_left_to_the_loader(load: Loader) -> None:
    model = Toy(load)
    before, parameters = state(model), dict(model.named_parameters())
    plan = learn(model, made(content()), cpu=False, least=0.0)
    assert set(plan.reloaded) == {"a"}
    assert set(plan.moves) == {"b"}
    assert plan.opened == {"one"}
    assert "one.weight" in plan.reloaded["a"]
    assert state(model) == before
    assert all(model.get_parameter(name) is value for name, value in parameters.items())
    with pytest.raises(Refused, match=r"only 25% of a version's bytes are plain copies: one\.weight"):
        learn(model, made(content()), cpu=False)


def test_what_shares_a_layer_with_something_computed_is_left_to_the_loader_too() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "a":
            model.one.weight.data.copy_(-torch.exp(tensor))
            model.two.weight.data[:4].copy_(tensor.flatten()[:4])
        else:
            model.two.weight.data[4:].copy_(tensor[4:])

    plan = learn(Toy(load), made(content()), cpu=False, least=0.0)
    assert set(plan.reloaded) == {"a", "b"}
    assert plan.opened == {"one", "two"}


def test_what_two_tensors_are_computed_into_before_it_is_loaded_is_of_both() -> None:
    class Collecting(Toy):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            found = dict(weights)
            both = torch.empty(4, 6, device=found["a"].device)
            both.copy_(found["a"] * 2)
            both[0].copy_(found["b"][:6] * 2)
            self.one.weight.data.copy_(both)

    plan = learn(Collecting(whole), made(content()), cpu=False, least=0.0)
    assert set(plan.reloaded) == {"a", "b"}
    assert plan.opened == {"one"}


def test_a_parameter_that_is_copied_from_another_is_left_to_the_loader_with_it() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        whole(model, name, tensor)
        if name == "a":
            model.two.twin.data.copy_(model.one.weight.data)

    model: Any = Toy(load)
    model.two.twin = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    plan = learn(model, made(content()), cpu=False, least=0.0)
    assert set(plan.reloaded) == {"a", "b"}
    assert plan.opened == {"one", "two"}


def test_a_loader_that_looks_into_what_it_loads_has_no_plan_and_leaves_the_model_whole() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        whole(model, name, tensor)
        if tensor.max().item() > 1e9:
            raise ValueError(name)

    model, known = Toy(load), Knowledge()
    parameters = dict(model.named_parameters())
    known.learn(model, made(content()), cpu=False)
    assert known.plan is None
    assert "could not be watched" in known.why
    assert known.way_of("a") == known.why
    assert all(model.get_parameter(name) is value for name, value in parameters.items())


def test_whatever_goes_wrong_while_a_loader_is_watched_is_a_reason_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def odd(*_: Any, **__: Any) -> str:
        raise AttributeError("a layer of a kind that nobody has foreseen")

    model, known = Toy(whole), Knowledge()
    monkeypatch.setattr("pitstop.engine.vllm_backend.plan.unfit", odd)
    known.learn(model, made(content()), cpu=False)
    assert (known.plan, known.way_of("a")) == (None, known.why)
    assert "AttributeError: a layer of a kind that nobody has foreseen" in known.why


def test_what_is_a_parameter_only_while_it_loads_is_left_to_the_loader() -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    def load(model: Any, name: str, tensor: Tensor) -> None:
        (model.two.scale if name == "c" else model.one.weight if name == "a" else model.two.weight).data.copy_(tensor)

    model: Any = Toy(load)
    model.two.scale = nn.Parameter(torch.zeros(1), requires_grad=False)
    record_metadata_for_reloading(model)
    del model.two.scale
    plan = learn(model, made({**content(), "c": torch.ones(1)}), cpu=False)
    assert plan.reloaded.keys() == {"b", "c"}
    assert "two.scale is there only while it loads" in plan.reloaded["c"]
    assert plan.opened == {"two"}
    assert not hasattr(model.two, "scale")


def test_a_plan_is_compared_with_what_a_version_brings_not_with_what_a_loader_leaves_of_it() -> None:
    class Changing:
        """What loads the version, in vLLM's place."""

        def begin(self) -> None: ...

        def finish(self) -> None: ...

        def feed(self, tensors: Any) -> None:
            for spec, tensor in tensors:
                doubled_where_it_is(model, spec.name, tensor)

    model, known = Toy(whole), Knowledge()
    known.learn(model, made(content()), cpu=False)
    reload: Any = Changing()
    proving = Proving(known, reload, Live(model))
    proving.begin()
    proving.feed([(spec, content()[spec.name]) for spec in made(content())])
    proving.finish()
    assert known.plan is not None
    assert known.plan.reloaded == {"a": "one.weight does not hold a where the plan puts it"}


def test_a_tensor_that_is_not_this_ranks_goes_nowhere() -> None:
    plan = learn(Toy(whole), made({**content(), "c": torch.zeros(5)}), cpu=False)
    assert plan.moves["c"] == ()
    assert "c" not in plan.reloaded


@pytest.mark.parametrize("replaced", [True, False])
def test_b63_a_parameter_that_has_moved_is_found_where_it_is(*, replaced: bool) -> None:
    model = Toy(whole)
    plan, live = learn(model, made(content()), cpu=False), Live(model)
    live.refresh()
    ((place, *_),) = live.pairs("a", plan.moves["a"])
    live.refresh()
    assert live.moved == 1
    if replaced:
        model.one.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    else:
        model.one.weight.data = torch.zeros(4, 6)
    live.refresh()
    ((there, *_),) = live.pairs("a", plan.moves["a"])
    there.copy_(content()["a"])
    assert torch.equal(model.one.weight, content()["a"])
    assert not place.any()
    assert live.moved == 2


@pytest.mark.parametrize("prepared", [True, False])
def test_b63_what_was_made_ready_follows_a_parameter_that_moves_before_the_swap(prepared: bool) -> None:
    model, specs = Toy(whole), made(content())
    load = Planned(learn(model, specs, cpu=False), None, Live(model), torch.device("cpu"))
    staged = [(spec, content()[spec.name]) for spec in specs]
    if prepared:
        load.ready(staged)
    before, model.one.weight.data = model.one.weight.data, torch.zeros(4, 6)
    load.begin()
    load.feed(staged)
    load.complete()
    load.finish()
    assert torch.equal(model.one.weight, content()["a"])
    assert torch.equal(model.two.weight, content()["b"])
    assert not before.any()


def test_a_staged_version_is_referred_to_until_it_is_forgotten_and_no_longer() -> None:
    model, specs = Toy(whole), made(content())
    load = Planned(learn(model, specs, cpu=False), None, Live(model), torch.device("cpu"))
    staged = [(spec, content()[spec.name]) for spec in specs]
    alive = [weakref.ref(tensor) for _, tensor in staged]
    load.ready(staged)
    load.begin()
    load.feed(staged)
    load.complete()
    load.finish()
    del staged
    # Thousands of views are not dropped while nothing is served.
    assert all(ref() is not None for ref in alive)
    load.forget()
    assert all(ref() is None for ref in alive)


def test_what_a_loader_fills_a_parameter_up_with_is_put_there_again() -> None:
    """A sleep that discards weights discards the padding of a vocabulary, too."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "a":
            model.one.weight.data[:4].copy_(tensor)
            model.one.weight.data[4:5].zero_()
            model.one.weight.data[5:].fill_(3.0)
        to_two(model, name, tensor)

    model, specs = Toy(load), made(content())
    model.one.weight = nn.Parameter(torch.zeros(6, 6), requires_grad=False)
    model.one.weight.weight_loader_numel = 24
    load_it = Planned(learn(model, specs, cpu=False), None, Live(model), torch.device("cpu"))
    with torch.no_grad():
        model.one.weight.fill_(float("nan"))
    load_it.begin()
    load_it.feed([(spec, content()[spec.name]) for spec in specs])
    load_it.complete()
    load_it.finish()
    assert torch.equal(model.one.weight[:4], content()["a"])
    assert model.one.weight[4:].tolist() == [[0.0] * 6, [3.0] * 6]


def test_names_of_one_parameter_are_one_place() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "a":
            model.two.head.data.copy_(tensor)
        to_two(model, name, tensor)

    model: Any = Toy(load)
    model.two.head = model.one.weight
    plan = learn(model, made(content()), cpu=False)
    replay(model, plan, content())
    assert torch.equal(model.one.weight, content()["a"])
    assert plan.learned.owners["one.weight"] == {"one", "two"}


ROWS = View(24, (3, 4), (4, 1))
"""Three rows in the middle of a larger parameter."""


@pytest.mark.parametrize(
    ("source", "target", "shape", "whole"),
    [
        (View(0, (3, 4), (4, 1)), ROWS, (3, 4), True),
        (View(0, (12,), (1,)), ROWS, (3, 4), True),
        (View(0, (3, 1, 4), (4, 99, 1)), ROWS, (3, 4), True),
        (View(0, (), ()), View(7, (), ()), (), True),
        (View(0, (3, 4), (4, 1)), ROWS, (6, 4), False),  # the first half of it
        (View(12, (3, 4), (4, 1)), ROWS, (6, 4), False),  # the second
        (View(12, (3, 4), (4, 1)), ROWS, (3, 4), False),  # beyond its end
        (View(0, (3, 4), (1, 3)), ROWS, (4, 3), False),  # turned on the way
        (View(0, (3, 4), (4, 1)), View(0, (3, 4), (8, 1)), (3, 4), False),  # every other row
        (View(0, (3, 4), (0, 1)), ROWS, (3, 4), False),  # one row thrice
    ],
)
def test_only_what_goes_whole_and_in_order_to_one_piece_of_memory_may_be_received_there(
    source: View, target: View, shape: tuple[int, ...], *, whole: bool
) -> None:
    assert Move("t", source, "p", target).whole(shape) is whole
