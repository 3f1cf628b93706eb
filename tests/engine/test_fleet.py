"""What callers of a fleet see, on simulated engines."""

from __future__ import annotations

import asyncio
import gc

import pytest

from pitstop.engine.errors import (
    EngineClosed,
    InvalidRequest,
    MissingTensors,
    NotServing,
    ReplicaDied,
    StaleVersion,
    UnsupportedPolicy,
)
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import Deadlines, Outcome, RefitOptions
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import TORN, Delays, Script, SimulatedBackend
from pitstop.engine.worker_ports import TensorSpec
from tests.engine.sim import SimFleet, expected, fleet

FIVE = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=400)


async def test_a_completion_has_the_tokens_of_the_version_it_names() -> None:
    async with fleet() as engine:
        done = await engine.generate([1, 2, 3], FIVE)
        assert list(done.token_ids) == expected([1, 2, 3], done.spans)
        assert done.spans == ((0, 0, 5),)
        assert done.finish_reason == "length"
        assert len(done.logprobs) == 5


async def test_completions_come_in_the_order_they_finish_with_their_index() -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        lengths = [30, 3, 15]
        params = [SamplingParams(max_tokens=n) for n in lengths]
        order = [i async for i, c in engine.generate_async([[1], [2], [3]], params)]
        assert order == [1, 2, 0]


async def test_a_refit_under_a_stream_splits_it_exactly_where_versions_meet() -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        stream = engine.stream([7, 8], LONG)
        chunks = [await anext(stream)]
        report = await engine.refit_to(1)
        chunks += [chunk async for chunk in stream]
        assert report.outcome is Outcome.COMMITTED
        tokens = [t for c in chunks for t in c.token_ids]
        spans = [(c.weight_version, c.start, c.start + len(c.token_ids)) for c in chunks]
        assert tokens == expected([7, 8], spans)
        assert {c.weight_version for c in chunks} == {0, 1}
        assert len(tokens) == 400
        assert chunks[-1].finish_reason == "length"
        assert engine.weight_version == 1


@pytest.mark.parametrize("policy", ["keep", "recompute", "wait", "abort"])
async def test_each_policy_decides_the_fate_of_what_is_in_flight(policy: str) -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        tasks = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=60))) for n in range(4)]
        await asyncio.sleep(0.02)
        report = await engine.refit_to(1, RefitOptions(policy=policy))  # type: ignore[arg-type]
        done = await asyncio.gather(*tasks)
        assert report.outcome is Outcome.COMMITTED
        versions = {tuple(s.weight_version for s in c.spans) for c in done}
        reasons = {c.finish_reason for c in done}
        if policy in ("keep", "recompute"):
            assert (versions, reasons) == ({(0, 1)}, {"length"})
        elif policy == "wait":
            assert (versions, reasons) == ({(0,)}, {"length"})
        else:
            assert (versions, reasons) == ({(0,)}, {"abort"})
            assert all(0 < len(c.token_ids) < 60 for c in done)
        assert all(list(c.token_ids) == expected(c.prompt_token_ids, c.spans) for c in done)


async def test_requests_that_arrive_during_a_refit_run_under_the_new_version() -> None:
    async with fleet(delays=Delays(step=0.001, call=0.01)) as engine:
        handle = engine.refit_to(1)
        await engine.replicas[0].reached(frozenset({Phase.RECEIVING}))
        done = await engine.generate([1], FIVE)
        await handle
        assert done.spans == ((1, 0, 5),)


async def test_a_request_without_a_token_is_withdrawn_at_the_swap_and_salted_anew() -> None:
    async with fleet(delays=Delays(step=0.2)) as engine:
        task = asyncio.create_task(engine.generate([1], FIVE))
        await asyncio.sleep(0.01)
        salts = [leg.request.cache_salt for leg in engine.sims[0].legs.values()]
        await engine.refit_to(1, RefitOptions(policy="keep"))
        await asyncio.sleep(0.02)
        salts += [leg.request.cache_salt for leg in engine.sims[0].legs.values()]
        assert salts == ["w0.1", "w1.2"]
        assert (await task).spans == ((1, 0, 5),)


async def test_bad_tensors_are_refused_before_anything_is_suspended() -> None:
    async with fleet() as engine:
        before = list(engine.log.transitions)
        with pytest.raises(MissingTensors, match="b, c"):
            await engine.refit_to(1, tensors=[TensorSpec("a", "float32", (4,))])
        assert engine.log.transitions == before
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED


async def test_a_version_that_is_not_newer_is_refused() -> None:
    async with fleet() as engine:
        await engine.refit_to(3)
        for stale in (3, 2):
            with pytest.raises(StaleVersion):
                await engine.refit_to(stale)


@pytest.mark.parametrize("call", ["suspend", "receive", "land"])
async def test_a_refit_that_fails_clean_leaves_the_old_version_serving(call: str) -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        (engine.transport if call == "land" else engine.sims[0]).script.plan(call, "raise")
        stream = engine.stream([5], LONG)
        await anext(stream)
        with pytest.raises(Exception, match="scripted"):
            await engine.refit_to(1)
        await engine.replicas[0].reached(frozenset({Phase.SERVING}))
        assert engine.weight_version == 0
        assert {c.weight_version async for c in stream} == {0}
        assert (await engine.refit_to(2)).outcome is Outcome.COMMITTED


@pytest.mark.parametrize("call", ["apply", "finalize", "reset_cache", "resume"])
async def test_a_torn_replica_is_quarantined_until_a_full_refit_and_never_serves(call: str) -> None:
    async with fleet(2, delays=Delays(step=0.001)) as engine:
        engine.sims[0].script.plan(call, "raise")
        streams = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=100))) for n in range(4)]
        await asyncio.sleep(0.02)
        report = await engine.refit_to(1)
        assert report.outcome is Outcome.PARTIAL
        assert engine.phase() is Phase.QUARANTINED
        assert engine.replicas[0].weight_version is None
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert sum(isinstance(o, BaseException) for o in outcomes) == 2
        fresh = await asyncio.gather(*(engine.generate([n], FIVE) for n in range(4)))
        assert {c.replica for c in fresh} == {"replica-1"}
        assert (await engine.refit_to(2)).outcome is Outcome.COMMITTED
        assert engine.phase() is Phase.SERVING
        fresh = await asyncio.gather(*(engine.generate([n], FIVE) for n in range(4)))
        assert TORN not in {t for c in fresh for t in c.token_ids}
        assert {c.replica for c in fresh} == {"replica-0", "replica-1"}


async def test_the_same_version_brings_a_quarantined_replica_up_to_its_siblings() -> None:
    async with fleet(2) as engine:
        engine.sims[1].script.plan("apply", "raise")
        assert (await engine.refit_to(4)).outcome is Outcome.PARTIAL
        report = await engine.refit_to(4)
        assert (report.outcome, set(report.replicas)) == (Outcome.COMMITTED, {"replica-1"})


async def test_requests_held_on_a_dying_replica_end_with_the_typed_error_and_others_serve() -> None:
    async with fleet(2, delays=Delays(step=0.001)) as engine:
        tasks = [asyncio.create_task(engine.generate([n], LONG)) for n in range(4)]
        await asyncio.sleep(0.02)
        engine.sims[0].die()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(d) for d in done].count(ReplicaDied) == 2
        assert engine.phase() is Phase.DEAD
        assert (await engine.generate([9], FIVE)).replica == "replica-1"
        await engine.restart()
        assert (engine.replicas[0].phase, engine.replicas[0].incarnation) == (Phase.IDLE, 2)
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED
        assert (await asyncio.gather(*(engine.generate([n], FIVE) for n in range(2))))[0].spans == ((1, 0, 5),)


async def test_a_restarted_replica_that_proves_nothing_waits_for_a_refit() -> None:
    async with fleet(weight_version=None) as engine:
        assert engine.phase() is Phase.IDLE
        with pytest.raises(NotServing, match="a full refit is missing"):
            await engine.generate([1], FIVE)
        await engine.refit_to(0)
        assert (await engine.generate([1], FIVE)).spans == ((0, 0, 5),)


async def test_sleep_level_1_keeps_the_commit_and_level_2_needs_a_refit() -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        task = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=40)))
        await asyncio.sleep(0.01)
        await engine.sleep(1)
        assert engine.phase() is Phase.SLEEPING
        with pytest.raises(NotServing, match="wake_up"):
            await engine.generate([1], FIVE)
        await engine.wake_up()
        assert (await task).spans == ((0, 0, 40),)
        await engine.sleep(2)
        await engine.wake_up()
        assert engine.phase() is Phase.IDLE
        with pytest.raises(NotServing, match="full refit"):
            await engine.generate([1], FIVE)
        await engine.refit_to(1)
        assert (await engine.generate([1], FIVE)).spans == ((1, 0, 5),)
        with pytest.raises(UnsupportedPolicy):
            await engine.sleep(1, policy="keep")  # type: ignore[arg-type]


async def test_a_suspend_that_never_settles_makes_the_replica_dead_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pitstop.engine.actions._SETTLE", 0.05)
    async with fleet(delays=Delays(step=0.001)) as engine:
        engine.sims[0].script.plan("suspend", "hang")
        task = asyncio.create_task(engine.generate([1], LONG))
        await asyncio.sleep(0.01)
        with pytest.raises(Exception, match="suspend did not end within"):
            await engine.refit_to(1, RefitOptions(deadlines=Deadlines(suspend=0.05)))
        with pytest.raises(Exception, match="suspend did not end"):
            await task
        assert engine.phase() is Phase.DEAD


async def test_a_newer_version_supersedes_the_pending_one_and_a_bad_offer_displaces_nothing() -> None:
    async with fleet(delays=Delays(call=0.02)) as engine:
        first = engine.refit_to(1)
        await engine.replicas[0].reached(frozenset({Phase.SUSPENDING}))
        second = engine.refit_to(2)
        bad = engine.refit_to(9, tensors=[TensorSpec("a", "float32", (4,))])
        third = engine.refit_to(3)
        assert (await first).outcome is Outcome.COMMITTED
        assert (await second).outcome is Outcome.SUPERSEDED
        with pytest.raises(MissingTensors):
            await bad
        assert (await third).outcome is Outcome.COMMITTED
        await second.sent.wait()


async def test_a_version_still_staging_gives_way_to_a_newer_one() -> None:
    async with fleet() as engine:
        script = Script()
        script.plan("send", "hang")
        first = engine.refit_to(1, script=script)
        await asyncio.sleep(0.02)
        second = engine.refit_to(2)
        assert (await second).outcome is Outcome.COMMITTED
        assert (await first).outcome is Outcome.SUPERSEDED


async def test_a_mute_receiver_costs_its_deadline_and_no_more() -> None:
    async with fleet(2) as engine:
        engine.transport.script.plan("land", "hang")
        limits = Deadlines(receive=0.1, receive_per_gib=0)
        report = await engine.refit_to(1, RefitOptions(deadlines=limits))
        assert report.outcome is Outcome.PARTIAL
        late = next(r for r in report.replicas.values() if not r.committed)
        assert late.error is not None
        assert late.error.slug == "deadline_exceeded"
        assert engine.phase() is Phase.SERVING


async def test_leaving_a_stream_in_any_way_aborts_its_request_exactly_once() -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        sim = engine.sims[0]

        async def broken() -> None:
            async for _ in engine.stream([1], LONG):
                break

        async def cancelled() -> None:
            async for _ in engine.stream([2], LONG):
                pass

        async def dropped() -> None:
            stream = engine.stream([3], LONG)
            await anext(stream)

        async def waiting() -> None:
            async for _ in engine.generate_async([[4]], LONG):
                pass

        await broken()
        await dropped()
        tasks = [asyncio.create_task(cancelled()), asyncio.create_task(waiting())]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gc.collect()
        await asyncio.sleep(0.02)
        assert sim.aborts == 4
        assert not sim.legs
        assert not engine.replicas[0].flights


async def test_bad_prompts_fail_alone() -> None:
    async with fleet(max_model_len=64) as engine:
        prompts = [[1] * 63, [1] * 64, [1] * 65, [1] * 1000, [], [10**7], [-1]] + [[n] for n in range(8)]
        got = {i: c async for i, c in engine.generate_async(prompts, SamplingParams(max_tokens=4))}
        assert (got[0].finish_reason, len(got[0].token_ids)) == ("length", 1)
        assert (got[1].finish_reason, len(got[1].token_ids)) == ("length", 0)
        for bad in (2, 3, 4, 5, 6):
            assert got[bad].finish_reason == "error"
            assert isinstance(got[bad].error, InvalidRequest)
        assert all(len(got[i].token_ids) == 4 for i in range(7, 15))
        with pytest.raises(InvalidRequest, match="65 tokens, the context 64"):
            engine.stream([1] * 65)
        assert (await engine.generate([1], SamplingParams(max_tokens=0))).finish_reason == "length"


async def test_requests_spread_over_replicas_and_sessions_stay() -> None:
    async with fleet(3) as engine:
        done = [c async for _, c in engine.generate_async([[n] for n in range(9)], FIVE)]
        assert sorted(c.replica or "" for c in done) == sorted(f"replica-{n % 3}" for n in range(9))
        homes = {(await engine.generate([n], FIVE, session_id="game")).replica for n in range(5)}
        assert len(homes) == 1


async def test_a_closed_engine_says_so_and_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    engine = fleet(2, delays=Delays(step=0.001))
    with pytest.raises(EngineClosed):
        engine.stream([1])
    async with engine:
        task = asyncio.create_task(engine.generate([1], LONG))
        await asyncio.sleep(0.01)
    with pytest.raises(EngineClosed):
        await task
    assert asyncio.all_tasks() == before


async def test_a_replica_that_cannot_boot_fails_the_launch_with_its_reason() -> None:
    backend = SimulatedBackend()
    backend.script.plan("start", "raise")
    with pytest.raises(Exception, match="scripted: start"):
        async with SimFleet([SimulatedBackend(), backend]):
            pass
