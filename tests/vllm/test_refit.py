"""What a refit does to requests in flight, to caches, and to a model whose update failed half-way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pitstop.engine.errors import LocalError, MissingTensors, PitstopError, ProtocolViolation, WorkerFailed
from tests.checkpoints import LAYERS, tensors
from tests.vllm.conftest import Garage
from tests.vllm.harness import PROMPT, Made, Replica, drain, request, until

LONG = 60


async def continued(fresh: Replica, prompt: tuple[int, ...], made: Made, at: int) -> Made:
    """What a fresh engine makes of a prompt and the tokens that were made before the swap."""
    return await fresh.run(prompt=(*prompt, *made.token_ids[:at]), max_tokens=LONG - at)


async def test_a_request_in_flight_continues_like_a_fresh_prefill_under_the_new_weights(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    old = await live.run(max_tokens=LONG)
    asked = request(max_tokens=LONG, salt="again")
    leg = await live.backend.submit(asked)
    early = await until(leg, 5)
    await live.land("r1", tensors("llama", 1))
    at = (await live.backend.suspend("recompute"))[asked.request_id]
    await live.swap("r1")
    await live.backend.resume()
    made = await drain(leg, early)
    assert 5 <= at < LONG
    assert (made.token_ids[:at], made.logprobs[:at]) == (old.token_ids[:at], old.logprobs[:at])
    rest = await continued(fresh, PROMPT, made, at)
    assert (made.token_ids[at:], made.logprobs[at:]) == (rest.token_ids, rest.logprobs)


@pytest.mark.parametrize("deltas", [True, False], ids=["deltas", "final only"])
async def test_the_count_at_the_swap_is_exact_for_a_consumer_that_reads_late(garage: Garage, deltas: bool) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    prompt = (*PROMPT, 98)
    old = await live.run(prompt=prompt, max_tokens=LONG)
    asked = request(prompt, LONG, salt="again", deltas=deltas)
    late, clock = await live.backend.submit(asked), await live.backend.submit(request(max_tokens=LONG))
    await until(clock, 8)
    await live.land("r1", tensors("llama", 1))
    at = (await live.backend.suspend("recompute"))[asked.request_id]
    await live.swap("r1")
    await live.backend.resume()
    made = await drain(late)
    assert 0 < at < LONG
    assert made.token_ids[:at] == old.token_ids[:at]
    assert made.token_ids[at:] == (await continued(fresh, prompt, made, at)).token_ids
    assert len(made.logprobs) == LONG


async def test_the_count_waits_for_outputs_that_the_reply_to_the_pause_has_overtaken(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    old = await live.run(max_tokens=LONG)
    life = live.backend._life
    assert life is not None
    leg = await live.backend.submit(asked := request(max_tokens=LONG, salt="again"))
    early = await until(leg, 3)
    core, free = life.llm.engine_core, asyncio.Event()
    take = core.get_output_async

    async def held_up() -> object:
        await free.wait()
        return await take()

    core.get_output_async = held_up
    while core.outputs_queue.qsize() < 5:
        await live.backend.reset_cache()
    suspending = asyncio.create_task(live.backend.suspend("recompute"))
    for _ in range(10):
        await live.backend.reset_cache()
    assert not suspending.done()
    free.set()
    at = (await suspending)[asked.request_id]
    await live.land("r1", tensors("llama", 1))
    await live.swap("r1")
    await live.backend.resume()
    made = await drain(leg, early)
    assert made.token_ids[:at] == old.token_ids[:at]
    assert made.token_ids[at:] == (await continued(fresh, PROMPT, made, at)).token_ids


async def test_keep_lets_every_request_go_on_and_no_cache_of_old_weights_is_hit(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    shared = tuple(64 + n % 26 for n in range(100))
    await live.run(prompt=shared, salt="w0")
    assert (await live.run(prompt=shared, salt="w0")).last.cached_tokens == 96
    asked = [request((*PROMPT, n), 100) for n in range(16)]
    legs = [await live.backend.submit(each) for each in asked]
    first = [await until(leg, 2) for leg in legs]
    await live.land("r1", tensors("llama", 1))
    counts = await live.backend.suspend("keep")
    assert counts.keys() == {each.request_id for each in asked}
    assert await live.backend.reset_cache() is False
    await live.swap("r1")
    await live.backend.resume()
    after = await live.run(prompt=shared, salt="w1")
    assert (after.last.cached_tokens, after[:2]) == (0, (await fresh.run(prompt=shared))[:2])
    ends = [await drain(leg, pieces) for leg, pieces in zip(legs, first, strict=True)]
    assert [(made.last.finish_reason, len(made.token_ids)) for made in ends] == [("length", 100)] * 16


async def test_keep_with_the_same_weights_changes_nothing(garage: Garage) -> None:
    live = await garage.start()
    old = await live.run(max_tokens=LONG)
    leg = await live.backend.submit(request(max_tokens=LONG, salt="again"))
    early = await until(leg, 5)
    await live.land("r1", tensors("llama", 0))
    await live.backend.suspend("keep")
    await live.swap("r1")
    await live.backend.resume()
    assert (await drain(leg, early))[:2] == old[:2]


async def test_a_prefix_that_was_cached_is_recomputed_even_under_the_old_salt(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    shared = tuple(64 + n % 26 for n in range(100))
    await live.run(prompt=shared)
    await live.refit(tensors("llama", 1))
    after = await live.run(prompt=shared)
    assert (after.last.cached_tokens, after[:2]) == (0, (await fresh.run(prompt=shared))[:2])
    assert await live.backend.reset_cache() is True


async def test_nothing_is_made_while_the_engine_is_suspended(garage: Garage) -> None:
    live = await garage.start()
    running = await live.backend.submit(held := request(max_tokens=200))
    await until(running, 2)
    before = await live.backend.suspend("keep")
    late = await asyncio.gather(*(live.backend.submit(request((*PROMPT, n), 4)) for n in range(20)))
    seen = live.backend.output_at()
    for _ in range(20):
        await live.backend.reset_cache()
    assert live.backend.output_at() == seen
    assert [leg.made for leg in late] == [0] * 20
    assert running.made == before[held.request_id]
    await live.backend.resume()
    assert [len((await drain(leg)).token_ids) for leg in late] == [4] * 20
    running.abort()


async def test_sleep_keeps_requests_and_the_scheduler_wakes_with_the_kv_cache(garage: Garage) -> None:
    live = await garage.start()
    old = await live.run(max_tokens=LONG)
    leg = await live.backend.submit(request(max_tokens=LONG, salt="again"))
    early = await until(leg, 3)
    await live.backend.suspend("recompute")
    await live.backend.sleep(1)
    await live.backend.wake(kv_cache=False)
    made = leg.made
    for _ in range(10):
        await live.backend.reset_cache()
    assert leg.made == made
    await live.backend.wake(kv_cache=True)
    assert (await drain(leg, early))[:2] == old[:2]


def without(*absent: str) -> dict[str, object]:
    return {name: tensor for name, tensor in tensors("llama", 1).items() if name not in absent}


LAST = f"model.layers.{LAYERS - 1}"


@pytest.mark.parametrize(
    ("broken", "error", "named"),
    [
        pytest.param(without(f"{LAST}.mlp.up_proj.weight"), MissingTensors, "gate_up_proj.weight", id="half a layer"),
        pytest.param(without(f"{LAST}.mlp.down_proj.weight"), MissingTensors, "down_proj.weight", id="a whole layer"),
        pytest.param(without("model.embed_tokens.weight"), MissingTensors, "embed_tokens", id="the embedding"),
        pytest.param(without("model.norm.weight"), MissingTensors, "norm.weight", id="a norm"),
        pytest.param(
            {**tensors("llama", 1), f"{LAST}.mlp.strange.weight": tensors("llama", 1)["model.norm.weight"]},
            WorkerFailed, "strange", id="one too many",
        ),
        pytest.param(
            {**tensors("llama", 1), f"{LAST}.self_attn.o_proj.weight": tensors("llama", 1)["model.norm.weight"]},
            PitstopError, "apply", id="a wrong shape",
        ),
    ],
)  # fmt: skip
async def test_an_update_that_fails_half_way_is_torn_then_runs_then_takes_a_full_refit(
    garage: Garage, broken: dict[str, object], error: type[Exception], named: str
) -> None:
    live, fresh = await garage.start(seed=0), await garage.start(seed=1)
    await live.land("bad", broken)  # type: ignore[arg-type]
    await live.backend.suspend("recompute")
    with pytest.raises(error, match=named):
        await live.ask("apply", "bad")
    (reply,) = await live.ask("undo", "bad")
    assert reply.touched
    await live.ask("release", "bad")
    await live.heard("closed")
    await live.backend.resume()
    assert len((await live.run(salt="torn")).token_ids) == 24
    await live.refit(tensors("llama", 1))
    assert (await live.run(salt="w1"))[:2] == (await fresh.run())[:2]


async def test_letting_go_between_load_and_post_load_leaves_a_model_that_runs(garage: Garage) -> None:
    live, fresh = await garage.start("tied", 0), await garage.start("tied", 1)
    await live.land("r1", tensors("tied", 1))
    await live.backend.suspend("recompute")
    await live.ask("apply", "r1")
    await live.ask("release", "r1")
    await live.heard("closed")
    with pytest.raises(ProtocolViolation):
        await live.ask("finalize", "r1")
    await live.backend.resume()
    assert len((await live.run(salt="torn")).token_ids) == 24
    await live.refit(tensors("tied", 1))
    assert (await live.run(salt="w1"))[:2] == (await fresh.run())[:2]


async def test_a_full_refit_repairs_a_failed_one_that_nobody_undid(garage: Garage) -> None:
    live, fresh = await garage.start("mixtral", 0), await garage.start("mixtral", 1)
    content = tensors("mixtral", 1)
    await live.land("bad", {name: tensor for name, tensor in content.items() if "experts.2.w3" not in name})
    await live.backend.suspend("recompute")
    with pytest.raises(MissingTensors, match="w13_weight"):
        await live.ask("apply", "bad")
    await live.ask("release", "bad")
    await live.heard("closed")
    await live.land("good", content)
    await live.swap("good")
    await live.backend.resume()
    assert (await live.run(salt="w1"))[:2] == (await fresh.run())[:2]


async def test_nothing_is_touched_before_everything_has_landed(garage: Garage) -> None:
    live = await garage.start()
    old = await live.run()
    (reply,) = await live.tell("apply", "never")
    assert reply.error is not None
    assert (reply.error.slug, reply.touched) == ("protocol_violation", False)
    await live.ask("receive", "mute", live.tickets("mute", tensors("llama", 1), token="mute"))
    (reply,) = await live.tell("apply", "mute")
    assert reply.error is not None
    assert (reply.error.slug, reply.touched) == ("missing_tensors", False)
    await live.ask("release", "mute")
    await live.heard("aborted")
    await live.ask("release", "mute")
    assert (await live.run(salt="again"))[:2] == old[:2]


async def test_a_finalize_without_an_apply_is_refused(garage: Garage) -> None:
    live = await garage.start()
    await live.land("r1", tensors("llama", 1))
    with pytest.raises(ProtocolViolation):
        await live.ask("finalize", "r1")
    await live.ask("release", "r1")


@pytest.mark.parametrize("name", ["os:system", "pitstop_evil.module:Receiver", "pitstop.engine.nothing:Receiver", "x"])
async def test_a_receiver_that_nobody_declared_is_refused(garage: Garage, name: str) -> None:
    live = await garage.start()
    live._receiver = name
    with pytest.raises(LocalError, match="receiver"):
        await live.land("r1", tensors("llama", 1))


@pytest.mark.parametrize("sent", [["embed"], ["head"], ["embed", "head"]], ids=" and ".join)
async def test_either_or_both_of_two_tied_tensors_may_be_sent(garage: Garage, sent: list[str]) -> None:
    live, fresh = await garage.start("tied", 0), await garage.start("tied", 1)
    content = tensors("tied", 1)
    shared = content.pop("model.embed_tokens.weight")
    if "head" in sent:
        content["lm_head.weight"] = shared
    if "embed" in sent:
        content["model.embed_tokens.weight"] = shared.clone()
    await live.refit(content)
    assert (await live.run(salt="w1"))[:2] == (await fresh.run())[:2]


async def test_the_engine_computes_in_its_own_dtype_whatever_the_checkpoint_holds(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0, dtype="bfloat16"), await garage.start(seed=1, dtype="bfloat16")
    await live.refit(tensors("llama", 1))
    assert (await live.run(salt="w1"))[:2] == (await fresh.run())[:2]


@pytest.mark.parametrize("family", ["tied", "mixtral"])
async def test_an_engine_without_weights_proves_nothing_and_takes_a_full_refit(garage: Garage, family: str) -> None:
    live, fresh = await garage.start(family, load_format="dummy"), await garage.start(family, 1)
    assert (live.booted.weight_version, fresh.booted.weight_version) == (None, 0)
    by_name = {spec.name: spec for spec in live.booted.inventory.tensors}
    assert by_name == {spec.name: spec for spec in fresh.booted.inventory.tensors}
    assert live.booted.inventory.tied == fresh.booted.inventory.tied
    await live.refit(tensors(family, 1))
    assert (await live.run(salt="w1"))[:2] == (await fresh.run())[:2]


async def test_the_engines_own_word_for_its_weights_is_ours(garage: Garage) -> None:
    live = await garage.start()
    life = live.backend._life
    assert life is not None
    if not life.can.weight_versions:
        pytest.skip("this vLLM has no weight versions")
    assert await life.llm.get_weight_version() == "0"
    leg = await live.backend.submit(request(max_tokens=LONG))
    early = await until(leg, 5)
    made = sum(len(piece.token_ids) for piece in early)
    await live.land("r1", tensors("llama", 1))
    (at,) = (await live.backend.suspend("recompute")).values()
    await live.swap("r1")
    await live.backend.label(7)
    await live.backend.resume()
    while made < LONG:
        output = await leg._collector.get()
        made += len(output.outputs[0].token_ids)
    spans = [(span.version, span.start, span.end) for span in output.outputs[0].weight_versions]
    assert spans == [("0", 0, at), ("7", at, LONG)]


async def test_suspending_does_not_disturb_statistics(garage: Garage) -> None:
    seen: list[int] = []

    class Counts:
        def __init__(self, *_: object) -> None: ...

        def record(self, scheduler_stats: object, iteration_stats: Any, *_: object, **__: object) -> None:
            seen.append(iteration_stats.num_generation_tokens if iteration_stats else 0)

        def log(self, *_: object) -> None: ...
        def log_engine_initialized(self) -> None: ...
        def record_sleep_state(self, *_: object) -> None: ...

    live = await garage.start(stat_loggers=(Counts,), disable_log_stats=False)
    await live.refit(tensors("llama", 1))
    await live.run()
    assert sum(seen) == 24


@pytest.mark.parametrize("family", ["llama", "tied", "mixtral"])
async def test_parameters_keep_their_addresses(garage: Garage, family: str) -> None:
    live = await garage.start(family)
    before = await live.addresses()
    await live.refit(tensors(family, 1))
    await live.run(salt="w1")
    assert await live.addresses() == before


async def test_every_rank_of_a_replica_takes_its_part(garage: Garage) -> None:
    live, fresh = await garage.start(seed=0, tensor_parallel_size=2), await garage.start(seed=1)
    assert [place.rank for place in live.booted.layout] == [0, 1]
    assert len({place.pid for place in live.booted.layout}) == 2
    await live.refit(tensors("llama", 1))
    made, wanted = await live.run(salt="w1"), await fresh.run()
    assert made.token_ids == wanted.token_ids
    assert made.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
