"""A version that goes straight into a suspended engine, group by group: whole or torn, and repaired by the next one."""

from __future__ import annotations

import asyncio

import pytest

from pitstop.engine.errors import MissingTensors, ProtocolViolation, UnexpectedTensors
from tests.checkpoints import LAYERS, tensors
from tests.vllm.conftest import Garage
from tests.vllm.harness import Replica, drain, request, until

LAST = f"model.layers.{LAYERS - 1}"


async def same(live: Replica, fresh: Replica, salt: str) -> None:
    """Compare an engine with one that was started from the checkpoint: memory, tokens, logprobs."""
    assert await live.fingerprint() == await fresh.fingerprint()
    assert (await live.run(salt=salt))[:2] == (await fresh.run(salt=salt))[:2]


@pytest.mark.parametrize("family", ["llama", "tied", "qwen2", "mixtral", "qwen3_moe"])
async def test_groups_of_any_size_and_order_make_what_a_fresh_start_makes(garage: Garage, family: str) -> None:
    live, old, new = await garage.start(family, 0), await garage.start(family, 0), await garage.start(family, 1)
    for n, groups in enumerate((1, 4, 40)):
        await live.refit_in_place(tensors(family, 1), groups, seed=n)
        await same(live, new, f"new {n}")
        await live.refit_in_place(tensors(family, 0), groups, seed=n + 10)
        await same(live, old, f"old {n}")
    assert (await old.run())[:2] != (await new.run())[:2]


async def test_a_staged_refit_and_one_in_place_follow_each_other(garage: Garage) -> None:
    live, old, new = await garage.start(seed=0), await garage.start(seed=0), await garage.start(seed=1)
    await live.refit(tensors("llama", 1))
    await same(live, new, "1")
    await live.refit_in_place(tensors("llama", 0))
    await same(live, old, "2")
    await live.refit(tensors("llama", 1))
    await same(live, new, "3")


async def test_a_request_in_flight_goes_on_under_the_new_weights(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    old = await live.run(max_tokens=60)
    leg = await live.backend.submit(asked := request(max_tokens=60, salt="again"))
    early = await until(leg, 5)
    at = (await live.backend.suspend("recompute"))[asked.request_id]
    assert await live.feed("r1", tensors("llama", 1), 40) == ["landed"]
    await live.swap("r1")
    await live.backend.resume()
    made = await drain(leg, early)
    rest = await fresh.run(prompt=(*asked.prompt_token_ids, *made.token_ids[:at]), max_tokens=60 - at)
    assert (made.token_ids[:at], made.token_ids[at:]) == (old.token_ids[:at], rest.token_ids)


@pytest.mark.parametrize("sent", [["embed"], ["head"], ["embed", "head"]], ids=" and ".join)
async def test_tied_tensors_may_come_in_any_bucket(garage: Garage, sent: list[str]) -> None:
    live, fresh = await garage.start("tied", 0), await garage.start("tied", 1)
    content = tensors("tied", 1)
    shared = content.pop("model.embed_tokens.weight")
    content |= {"lm_head.weight": shared} if "head" in sent else {}
    content |= {"model.embed_tokens.weight": shared.clone()} if "embed" in sent else {}
    for seed in range(4):
        await live.refit_in_place(tensors("tied", 0))
        await live.refit_in_place(content, 40, seed=seed)
        await same(live, fresh, f"w{seed}")


@pytest.mark.parametrize(
    ("family", "absent", "named", "groups"),
    [
        ("llama", f"{LAST}.mlp.up_proj.weight", "gate_up_proj.weight", 40),
        ("llama", f"{LAST}.mlp.down_proj.weight", "down_proj.weight", 1),
        ("llama", "model.norm.weight", "norm.weight", 40),
        ("llama", f"{LAST}.self_attn.k_proj.weight", "qkv_proj.weight", 1),
        ("mixtral", f"{LAST}.block_sparse_moe.experts.2.w3.weight", "w13_weight", 1),
        ("mixtral", f"{LAST}.block_sparse_moe.experts.2.w3.weight", "w13_weight", 40),
    ],
)
async def test_what_is_missing_is_named_and_the_engine_is_torn_until_a_whole_refit(
    garage: Garage, family: str, absent: str, named: str, groups: int
) -> None:
    live, fresh = await garage.start(family, 0), await garage.start(family, 1)
    content = tensors(family, 1)
    await live.backend.suspend("recompute")
    broken = {name: tensor for name, tensor in content.items() if name != absent}
    assert await live.feed("bad", broken, groups) == ["landed"]
    with pytest.raises(MissingTensors, match=named):
        await live.ask("apply", "bad")
    with pytest.raises(ProtocolViolation):
        await live.ask("finalize", "bad")
    await torn(live, "bad", said="closed")
    await live.refit_in_place(content, groups)
    await same(live, fresh, "w1")


async def test_what_the_model_ignores_in_silence_is_named(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    content = tensors("llama", 1)
    ignored = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for seed in range(3):
        await live.backend.suspend("recompute")
        # As large as others, so that what comes next may lie where it lay.
        strange = {ignored: content["lm_head.weight"].clone()}
        assert await live.feed(f"bad {seed}", {**content, **strange}, 40, seed=seed) == ["landed"]
        with pytest.raises(UnexpectedTensors, match=r"1 tensors .*inv_freq"):
            await live.ask("apply", f"bad {seed}")
        await torn(live, f"bad {seed}", said="closed")
    await live.refit_in_place(content)
    await same(live, fresh, "w1")


async def test_what_a_loader_refuses_ends_the_refit_torn(garage: Garage) -> None:
    live, fresh = await garage.start("mixtral", 0), await garage.start("mixtral", 1)
    content = tensors("mixtral", 1)
    await live.backend.suspend("recompute")
    wrong = {f"{LAST}.block_sparse_moe.experts.1.w2.weight": content["model.norm.weight"].clone()}
    (said,) = await live.feed("bad", {**content, **wrong}, 40)
    assert said != "landed"
    await torn(live, "bad", said="closed")
    await live.refit(content)
    await same(live, fresh, "w1")


async def torn(live: Replica, refit_id: str, *, said: str) -> None:
    """Undo, let go, and see that what is left runs."""
    (reply,) = await live.ask("undo", refit_id)
    assert reply.touched
    await live.ask("release", refit_id)
    await live.heard(said)
    await live.backend.resume()
    assert len((await live.run(salt="torn")).token_ids) == 24


@pytest.mark.parametrize(
    ("verb", "family", "stop"),
    [("undo", "llama", 12), ("undo", "tied", 5), ("undo", "mixtral", 20), ("release", "llama", 1),
     ("release", "llama", 12), ("release", "qwen3_moe", 9)],
)  # fmt: skip
async def test_letting_go_half_way_leaves_an_engine_that_runs_and_drops_what_comes_late(
    garage: Garage, family: str, stop: int, verb: str
) -> None:
    live, fresh = await garage.start(family, 0), await garage.start(family, 1)
    await live.backend.suspend("recompute")
    assert await live.feed("half", tensors(family, 1), 40, seed=stop, stop=stop) == ["half way"]
    if verb == "undo":
        (reply,) = await live.ask("undo", "half")
        assert reply.touched
        await live.heard("aborted")
        (reply,) = await live.tell("apply", "half")
        assert reply.error is not None
        await live.ask("release", "half")
    else:
        await live.ask("release", "half")
        await live.heard("aborted")
    await live.heard("closed")
    await live.backend.resume()
    assert len((await live.run(salt="torn")).token_ids) == 24
    await live.refit_in_place(tensors(family, 1), 40)
    await same(live, fresh, "w1")


async def test_nothing_is_touched_before_the_first_group(garage: Garage) -> None:
    live = await garage.start()
    old, memory = await live.run(), await live.fingerprint()
    (reply,) = await live.ask("undo", "never")
    assert not reply.touched
    assert await live.feed("r1", tensors("llama", 1), 4, stop=0) == ["half way"]
    (reply,) = await live.tell("apply", "r1")
    assert reply.error is not None
    assert (reply.error.slug, reply.touched) == ("missing_tensors", False)
    (reply,) = await live.ask("undo", "r1")
    assert not reply.touched
    await live.ask("release", "r1")
    await asyncio.sleep(0)
    assert (await live.fingerprint(), (await live.run(salt="again"))[:2]) == (memory, old[:2])


async def test_every_rank_takes_its_part(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0, tensor_parallel_size=2), await garage.start(seed=1, tensor_parallel_size=2)
    await live.refit_in_place(tensors("llama", 1), 40)
    await same(live, fresh, "w1")


async def test_parameters_keep_their_addresses(garage: Garage) -> None:
    live = await garage.start("mixtral")
    before = await live.addresses()
    await live.refit_in_place(tensors("mixtral", 1), 40)
    await live.run(salt="w1")
    assert await live.addresses() == before


async def test_an_engine_without_weights_takes_a_version_in_place(garage: Garage) -> None:
    live, fresh = await garage.start("tied", load_format="dummy"), await garage.start("tied", 1)
    await live.refit_in_place(tensors("tied", 1), 40)
    await same(live, fresh, "w1")
