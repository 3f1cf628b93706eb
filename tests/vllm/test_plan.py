"""Load plans on real engines: what is copied, what is not, and that a version is what a fresh start makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from pitstop.engine.errors import MissingTensors, PitstopError
from pitstop.engine.vllm_backend import loader_trace, plan
from pitstop.engine.vllm_backend.loader_trace import Traced
from pitstop.engine.worker_ports import WorkerOp
from tests.checkpoints import shapes, tensors, write
from tests.vllm.conftest import Garage
from tests.vllm.harness import Replica

PLAIN: dict[str, Any] = {"worker_cls": "tests.vllm.plain_worker.PlainWorker"}


async def way_of(live: Replica) -> list[dict[str, str]]:
    replies = await live.backend.call_workers(WorkerOp("ways", tensors=live.booted.inventory.tensors))
    assert not [reply.error for reply in replies if reply.error]
    return [reply.way_of or {} for reply in replies]


async def same(live: Replica, fresh: Replica, salt: str) -> None:
    """Compare an engine with one that was started from the checkpoint: memory, tokens, logprobs."""
    assert await live.fingerprint() == await fresh.fingerprint()
    assert (await live.run(salt=salt))[:2] == (await fresh.run(salt=salt))[:2]


@pytest.mark.parametrize("family", ["llama", "tied", "qwen2"])
async def test_after_one_version_all_that_follows_is_copied(garage: Garage, family: str) -> None:
    live, old, new = [await garage.start(family, seed, **PLAIN) for seed in (0, 0, 1)]
    assert set((await way_of(live))[0].values()) == {"the first version after a start proves the load plan"}
    await live.refit(tensors(family, 1))
    await same(live, new, "1")
    assert set((await way_of(live))[0].values()) == {"copied"}
    for n, seed in enumerate((0, 1, 1, 0)):
        await live.refit(tensors(family, seed))
        await same(live, new if seed else old, f"staged {n}")
        await live.refit_in_place(tensors(family, 1 - seed), (1, 4, 40)[n % 3], seed=n)
        await same(live, old if seed else new, f"in place {n}")


async def test_what_the_cpu_packs_has_no_plan_and_says_why(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    for _ in range(2):
        ways = await live.refit(tensors("llama", 1))
        assert (ways.copied, ways.reloaded) == (0, len(shapes("llama")))
        assert "packs" in ways.why
    await same(live, fresh, "1")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
async def test_what_cannot_be_copied_is_reloaded_beside_what_can(
    garage: Garage, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    defaults: Any = plan.learn.__kwdefaults__
    monkeypatch.setitem(defaults, "least", 0.0)
    live, old, new = [await garage.start(family, seed, **PLAIN) for seed in (0, 0, 1)]
    await live.refit(tensors(family, 1))
    experts = {name for name in shapes(family) if ".experts." in name}
    (found,) = await way_of(live)
    assert {name for name, way in found.items() if way != "copied"} == experts
    assert {found[name] for name in experts} == {"vLLM packs these weights for the CPU"}
    for n, seed in enumerate((0, 1, 1, 0)):
        ways = await live.refit(tensors(family, seed))
        assert (ways.copied, ways.reloaded) == (len(shapes(family)) - len(experts), len(experts))
        await same(live, new if seed else old, f"staged {n}")
        await live.refit_in_place(tensors(family, 1 - seed), (1, 4, 40)[n % 3], seed=n)
        await same(live, old if seed else new, f"in place {n}")


def swapped(spoil: Callable[[Traced], None]) -> Callable[..., Traced]:
    def traced(model: Any, specs: Any) -> Traced:
        found = loader_trace.trace(model, specs)
        spoil(found)
        return found

    return traced


def two_places(found: Traced) -> None:
    """Have two tensors of one shape swap places."""
    one, other = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    (a,), (b,) = found.moves[one], found.moves[other]
    found.moves[one] = [replace(a, parameter=b.parameter, target=b.target)]
    found.moves[other] = [replace(b, parameter=a.parameter, target=a.target)]
    found.lands[one], found.lands[other] = found.lands[other], found.lands[one]


def two_halves(found: Traced) -> None:
    """Have gate and up swap places inside of the parameter that holds both."""
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    (a,), (b,) = found.moves[gate], found.moves[up]
    found.moves[gate], found.moves[up] = [replace(a, target=b.target)], [replace(b, target=a.target)]


def a_shift(found: Traced) -> None:
    """Have a tensor come out of the wrong rows of its source."""
    name = "model.layers.0.self_attn.q_proj.weight"
    (a,) = found.moves[name]
    rows = a.source.size[0] // 2
    upper = replace(a.source, size=(rows, a.source.size[1]))
    lower = replace(upper, offset=rows * a.source.stride[0])
    target = replace(a.target, size=upper.size)
    below = replace(target, offset=a.target.offset + rows * a.target.stride[0])
    found.moves[name] = [replace(a, source=lower, target=target), replace(a, source=upper, target=below)]


@pytest.mark.parametrize("spoil", [two_places, two_halves, a_shift])
@pytest.mark.parametrize("mode", ["staged", "in place"])
async def test_a_plan_that_is_wrong_is_found_out_before_a_version_is_loaded_by_it(
    garage: Garage, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Traced], None], mode: str
) -> None:
    monkeypatch.setattr(plan, "trace", swapped(spoil))
    live, old, new = [await garage.start("llama", seed, **PLAIN) for seed in (0, 0, 1)]
    refit = live.refit if mode == "staged" else live.refit_in_place
    for n, seed in enumerate((1, 0, 1)):
        await refit(tensors("llama", seed))
        await same(live, new if seed else old, f"w{n}")
    (found,) = await way_of(live)
    wrong = {way for way in found.values() if way != "copied"}
    assert any("does not hold" in way for way in wrong)
    assert 0 < sum(way != "copied" for way in found.values()) < len(found)


async def test_weights_that_prove_no_place_are_left_to_the_loader(garage: Garage) -> None:
    live, new = await garage.start("qwen2", 0, **PLAIN), await garage.start("qwen2", 1, **PLAIN)
    flat = {name: t.zero_() if name.endswith("bias") else t for name, t in tensors("qwen2", 0).items()}
    await live.refit(flat)
    (found,) = await way_of(live)
    assert "is all one number" in found["model.layers.0.self_attn.k_proj.bias"]
    await live.refit(tensors("qwen2", 1))
    await same(live, new, "1")


async def test_a_padded_vocabulary_keeps_its_padding(
    garage: Garage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when all that was in memory has been discarded, as a sleep of level 2 does where there is a GPU."""
    monkeypatch.setattr("tests.checkpoints.VOCAB", 300)
    one, other = (write(tmp_path / str(seed), "llama", seed) for seed in (0, 1))
    live, fresh = await garage.start(model=one, **PLAIN), await garage.start(model=other, **PLAIN)

    def discard(worker: Any) -> None:
        for parameter in worker.get_model().parameters():
            parameter.data.fill_(float("nan"))

    for mode in (live.refit, live.refit, live.refit_in_place):
        await mode(tensors("llama", 1))
        await same(live, fresh, mode.__name__)
        assert set((await way_of(live))[0].values()) == {"copied"}
        await live.backend.suspend("recompute")
        assert live.backend._life is not None
        await live.backend._life.llm.collective_rpc(cloudpickle.dumps(discard))
        await live.backend.resume()


async def test_every_rank_has_a_plan_of_its_own_shards(garage: Garage) -> None:
    two = {**PLAIN, "tensor_parallel_size": 2}
    live, fresh = await garage.start("llama", 0, **two), await garage.start("llama", 1, **two)
    for n, seed in enumerate((1, 0, 1)):
        await live.refit(tensors("llama", seed))
        ways = await live.refit_in_place(tensors("llama", seed), 40, seed=n)
    # A part of a tensor has no place for the whole of it. All ranks have the norms alike, and the one head of keys.
    alike = ("norm", "k_proj", "v_proj")
    assert ways.straight == sum(any(part in name for part in alike) for name in tensors("llama", 0))
    await same(live, fresh, "1")
    ranks = await way_of(live)
    assert len(ranks) == 2
    assert all(set(found.values()) == {"copied"} for found in ranks)


async def test_b63_parameters_keep_their_addresses_through_planned_versions(garage: Garage) -> None:
    live = await garage.start("llama", 0, **PLAIN)
    before = await live.addresses()
    for seed in (1, 0, 1):
        await live.refit(tensors("llama", seed))
        await live.run(salt=f"w{seed}")
        assert await live.addresses() == before


@pytest.mark.parametrize("mode", ["staged", "in place"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
async def test_a_planned_version_that_is_not_whole_is_refused_and_repaired_by_the_next(
    garage: Garage, monkeypatch: pytest.MonkeyPatch, mode: str, family: str
) -> None:
    defaults: Any = plan.learn.__kwdefaults__
    monkeypatch.setitem(defaults, "least", 0.0)
    live, fresh = await garage.start(family, 0, **PLAIN), await garage.start(family, 1, **PLAIN)
    content = tensors(family, 1)
    await live.refit(tensors(family, 0))
    absent = "model.layers.1.self_attn.k_proj.weight"
    for name, sent, refused in (
        ("short", {n: t for n, t in content.items() if n != absent}, MissingTensors),
        ("strange", {**content, "model.layers.0.strange.weight": content["model.norm.weight"].clone()}, PitstopError),
    ):
        await live.backend.suspend("recompute")
        if mode == "staged":
            await live.land(name, sent)
        else:
            await live.feed(name, sent, 40)
        with pytest.raises(refused, match="k_proj" if name == "short" else "strange|uncalled|given up"):
            await live.ask("apply", name)
        await live.ask("undo", name)
        await live.ask("release", name)
        await live.heard("closed")
        await live.refit(content)
        await same(live, fresh, name)
