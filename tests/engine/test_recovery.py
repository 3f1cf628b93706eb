"""Lost replicas come back: on request from what is at hand or a checkpoint, by themselves, never with other content."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import pytest

from pitstop.engine.errors import (
    NotServing,
    OfferRejected,
    PitstopError,
    RemoteError,
    ReplicaDied,
    StaleVersion,
    UnsupportedPolicy,
)
from pitstop.engine.launch import RolloutEngine
from pitstop.engine.lifecycle import Phase
from pitstop.engine.recovery import Keeper, Recovery
from pitstop.engine.refit import Deadlines, Outcome, RefitOptions
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import TORN, Delays, Script
from tests.engine.sim import SimFleet, expected, fleet, until

FIVE = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=400)
QUICK = Recovery(attempts=4, backoff=0.02, longest=0.05, steady=60)
SLOW = Recovery(attempts=4, backoff=30, longest=30)


def serving(engine: SimFleet) -> bool:
    return all(r.phase is Phase.SERVING for r in engine.replicas)


def recoveries(engine: SimFleet) -> int:
    return sum(1 for name, _ in engine.log.counts if name == "rl.replica.recoveries")


async def dead(engine: SimFleet, n: int = 0) -> None:
    engine.sims[n].die()
    await engine.replicas[n].reached(frozenset({Phase.DEAD}))


# -- from a checkpoint, on request -------------------------------------------------------------------------


async def test_a_fleet_that_was_never_refitted_recovers_from_the_checkpoint_of_its_launch() -> None:
    async with fleet(2, checkpoints={"base": 0}, origin="base") as engine:
        await dead(engine)
        report = await engine.recover()
        assert report is not None
        assert (list(report.replicas), report.weight_version) == (["replica-0"], 0)
        done = await asyncio.gather(*(engine.generate([n], FIVE) for n in range(2)))
        assert {c.replica for c in done} == {"replica-0", "replica-1"}
        assert all(list(c.token_ids) == expected(c.prompt_token_ids, [(0, 0, 5)]) for c in done)
        assert await engine.recover() is None


async def test_the_checkpoint_of_the_launch_is_too_old_once_something_newer_was_served() -> None:
    async with fleet(2, checkpoints={"base": 0}, origin="base") as engine:
        await engine.refit_to(3)
        script = Script()
        script.plan("send", "raise")
        engine.transport._last = None  # something else lies there now
        await dead(engine)
        with pytest.raises(NotServing, match="version 3 is no longer at hand"):
            await engine.recover()
        assert [r.weight_version for r in engine.replicas] == [None, 3]


async def test_a_checkpoint_of_the_fleet_s_version_must_hold_what_was_committed_as_it() -> None:
    async with fleet(2, checkpoints={"step-3": 3, "other": 2}) as engine:
        await engine.refit_to(3)
        await dead(engine)
        with pytest.raises(OfferRejected, match="with other content"):
            await engine.recover("other")
        assert engine.phase() is Phase.IDLE
        report = await engine.recover("step-3")
        assert report is not None
        assert (list(report.replicas), report.weight_version) == (["replica-0"], 3)


async def test_the_same_content_in_another_order_is_the_same_version() -> None:
    async with fleet(2, checkpoints={"step-3": 3, "other": 2}) as engine:
        await engine.refit_to(3, tensors=list(reversed(engine.sims[0].specs)))
        await dead(engine)
        report = await engine.recover("step-3")
        assert report is not None
        assert report.outcome is Outcome.COMMITTED
        await dead(engine)
        with pytest.raises(OfferRejected, match="with other content"):
            await engine.recover("other")


async def test_what_was_loaded_at_launch_is_never_replaced_by_something_of_the_same_version() -> None:
    async with fleet(2, checkpoints={"base": 0, "other": 7}, origin="base") as engine:
        await dead(engine)
        with pytest.raises(OfferRejected, match="loaded at launch"):
            await engine.recover("other")
        with pytest.raises(OfferRejected, match="loaded at launch"):
            await engine.refit_to(0)
        assert engine.phase() is Phase.IDLE
        assert (await engine.recover("base")) is not None
        # Its digests are known by now, so the same content is welcome and other content is not.
        await dead(engine)
        with pytest.raises(OfferRejected, match="with other content"):
            await engine.recover("other")
        assert (await engine.recover("base")) is not None


async def test_a_version_that_came_from_a_checkpoint_is_read_from_it_again_when_a_later_one_took_its_room() -> None:
    async with fleet(checkpoints={"step-3": 3}) as engine:
        await engine.refit_from("step-3", 3)
        script = Script()
        script.plan("send", "hang")
        limits = Deadlines(receive=0.3, receive_per_gib=0)
        handle = engine.refit_to(4, RefitOptions(deadlines=limits), script=script)
        await asyncio.sleep(0.02)
        engine.transport._last = None  # its room is being written to
        await dead(engine)
        with pytest.raises(ReplicaDied):
            await handle
        report = await engine.recover()
        assert report is not None
        assert engine.weight_version == 3
        engine.checkpoints["step-3"] = 9
        engine.transport._last = None
        await dead(engine)
        with pytest.raises(OfferRejected, match="with other content"):
            await engine.recover()


async def test_an_older_checkpoint_is_served_only_if_the_caller_says_so() -> None:
    async with fleet(2, checkpoints={"step-1": 1}) as engine:
        await engine.refit_to(5)
        for n in range(2):
            await dead(engine, n)
        with pytest.raises(StaleVersion, match="rebase=True"):
            await engine.recover("step-1", weight_version=1)
        report = await engine.recover("step-1", weight_version=1, rebase=True)
        assert report is not None
        assert {r.weight_version for r in engine.replicas} == {1}
        old = await engine.generate([1], FIVE)
        assert engine.staleness(old) == 0


async def test_a_newer_checkpoint_is_a_refit_of_everybody() -> None:
    async with fleet(2, checkpoints={"step-9": 9}) as engine:
        await dead(engine)
        report = await engine.recover("step-9", weight_version=9)
        assert report is not None
        assert sorted(report.replicas) == ["replica-0", "replica-1"]
        assert engine.weight_version == 9


async def test_a_source_is_needed_for_what_is_said_of_a_source() -> None:
    async with fleet(weight_version=None, checkpoints={"base": 0}) as engine:
        with pytest.raises(UnsupportedPolicy, match="name one"):
            await engine.recover(rebase=True)
        with pytest.raises(UnsupportedPolicy, match="which weight_version"):
            await engine.recover("base")
        with pytest.raises(NotServing, match="no version was ever committed"):
            await engine.recover()


async def test_what_all_replicas_failed_to_take_is_taken_again_where_nothing_else_serves() -> None:
    async with fleet(2) as engine:
        for sim in engine.sims:
            sim.script.plan("apply", "raise")
        with pytest.raises(RemoteError, match="apply"):
            await engine.refit_to(1)
        assert {engine.phase(n) for n in range(2)} == {Phase.QUARANTINED}
        report = await engine.recover()
        assert report is not None
        assert {r.weight_version for r in engine.replicas} == {1}


async def test_a_rebase_that_all_replicas_failed_to_take_is_taken_again_as_one() -> None:
    async with fleet(2) as engine:
        await engine.refit_to(7)
        for sim in engine.sims:
            sim.script.plan("apply", "raise")
        with pytest.raises(RemoteError, match="apply"):
            await engine.refit_to(1, RefitOptions(rebase=True))
        assert await engine.recover() is not None
        assert {r.weight_version for r in engine.replicas} == {1}
        assert engine.staleness(await engine.generate([1], FIVE)) == 0


async def test_a_version_whose_refit_failed_is_not_brought_in_by_the_back_door() -> None:
    async with fleet(2, checkpoints={"base": 0}, origin="base") as engine:
        engine.sims[0].script.plan("apply", "raise")
        engine.sims[1].script.plan("suspend", "raise")
        with pytest.raises(RemoteError):
            await engine.refit_to(1)
        assert [engine.phase(n) for n in range(2)] == [Phase.QUARANTINED, Phase.SERVING]
        report = await engine.recover()
        assert report is not None
        assert (list(report.replicas), report.weight_version) == (["replica-0"], 0)
        assert {r.weight_version for r in engine.replicas} == {0}


async def test_one_engine_that_cannot_boot_does_not_keep_the_others_from_coming_back() -> None:
    async with fleet(3, checkpoints={"base": 0}, origin="base") as engine:
        for n in range(2):
            await dead(engine, n)
        engine.sims[0].script.plan("start", "raise")
        with pytest.raises(RemoteError, match="scripted: start"):
            await engine.recover()
        assert [engine.phase(n) for n in range(3)] == [Phase.DEAD, Phase.SERVING, Phase.SERVING]
        assert await engine.recover() is not None
        assert serving(engine)


async def test_recovering_while_a_trainer_publishes_ends_with_everybody_at_the_newest() -> None:
    async with fleet(2, delays=Delays(call=0.01)) as engine:
        await engine.refit_to(1)
        await dead(engine)
        refits = [engine.refit_to(2)]
        recovering = asyncio.create_task(engine.recover())
        await asyncio.sleep(0.02)
        refits.append(engine.refit_to(3))
        await asyncio.wait_for(recovering, 5)
        for handle in refits:
            await handle
        await engine.recover()
        assert {r.weight_version for r in engine.replicas} == {3}


# -- by itself ---------------------------------------------------------------------------------------------


async def test_a_dead_replica_comes_back_by_itself_with_the_version_last_published() -> None:
    async with fleet(2, recovery=QUICK, delays=Delays(step=0.001)) as engine:
        await engine.refit_to(4)
        engine.sims[0].die()
        await until(lambda: engine.replicas[0].incarnation == 2 and serving(engine))
        assert {r.weight_version for r in engine.replicas} == {4}
        done = await asyncio.gather(*(engine.generate([n], FIVE) for n in range(2)))
        assert {c.spans for c in done} == {((4, 0, 5),)}
        assert recoveries(engine) == 1


async def test_a_torn_replica_is_repaired_by_itself_and_never_served_a_torn_token() -> None:
    async with fleet(recovery=QUICK, delays=Delays(step=0.001)) as engine:
        engine.sims[0].script.plan("apply", "raise")
        stream = engine.stream([1], LONG)
        chunks = [await anext(stream)]
        with pytest.raises(RemoteError, match="apply"):
            await engine.refit_to(1)
        with pytest.raises(RemoteError, match="apply"):
            chunks += [chunk async for chunk in stream]
        # It waits in the gate until the repair is done.
        done = await engine.generate([2], FIVE)
        assert done.spans == ((1, 0, 5),)
        assert TORN not in {t for c in chunks for t in c.token_ids}


async def test_requests_wait_while_the_only_replica_comes_back_and_go_elsewhere_if_they_can() -> None:
    async with fleet(recovery=QUICK, delays=Delays(boot=0.05), checkpoints={"base": 0}, origin="base") as engine:
        await dead(engine)
        assert (await asyncio.wait_for(engine.generate([1], FIVE), 5)).spans == ((0, 0, 5),)
    async with fleet(2, recovery=QUICK, delays=Delays(boot=5), checkpoints={"base": 0}, origin="base") as engine:
        for sim in engine.sims:
            sim.delays.boot = 5
        await dead(engine)
        began = time.monotonic()
        assert (await engine.generate([1], FIVE)).replica == "replica-1"
        assert time.monotonic() - began < 1


async def test_a_caller_s_own_limit_ends_the_wait_for_a_recovery() -> None:
    async with fleet(recovery=QUICK) as engine:
        engine.sims[0].delays.boot = 30
        await dead(engine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.generate([1], FIVE)
        waiting = asyncio.create_task(engine.generate([1], FIVE))
        await asyncio.sleep(0.02)
        assert engine.abort() == 1
        assert (await waiting).finish_reason == "abort"


async def test_what_fails_again_and_again_is_given_up_with_its_error_and_costs_no_hot_loop() -> None:
    async with fleet(2, recovery=QUICK, checkpoints={"base": 0}, origin="base") as engine:
        starts: list[float] = []
        start = engine.sims[0].start

        async def failing(*args: Any) -> Any:
            starts.append(time.monotonic())
            raise RemoteError("no device")

        engine.sims[0].start = failing  # type: ignore[method-assign, assignment]
        await dead(engine)
        await until(lambda: not engine._keeper.hopeful)
        await asyncio.sleep(0.2)
        assert len(starts) == QUICK.attempts
        assert [b - a >= 0.015 for a, b in itertools.pairwise(starts)] == [True] * 3
        assert recoveries(engine) == 4
        await dead(engine, 1)
        engine.sims[1].start = failing  # type: ignore[method-assign, assignment]
        waiting = asyncio.create_task(engine.generate([1], FIVE))
        with pytest.raises(NotServing, match="recovery was given up after 4 tries: no device"):
            await asyncio.wait_for(waiting, 5)
        # Brought back by hand, it is looked after again.
        engine.sims[0].start = start  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="no device"):
            await engine.recover()
        assert engine.phase() is Phase.SERVING
        await dead(engine)
        await until(lambda: engine.phase() is Phase.SERVING)


async def test_an_engine_that_serves_and_dies_over_and_over_is_given_up_too() -> None:
    async with fleet(2, recovery=QUICK) as engine:
        await engine.refit_to(1)
        for life in range(1, QUICK.attempts + 1):
            await until(lambda life=life: engine.replicas[0].incarnation == life and serving(engine))  # type: ignore[misc]
            engine.sims[0].die()
            await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        await until(lambda: engine.replicas[0].incarnation == QUICK.attempts + 1 and serving(engine))
        await dead(engine)
        await asyncio.sleep(0.2)
        assert engine.phase() is Phase.DEAD
        assert not engine._keeper.hopeful


@pytest.mark.parametrize("attempts", [1, 2])
async def test_one_that_dies_as_its_refit_ends_is_judged_when_it_has_ended_and_tried_no_more_often_than_was_said(
    monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    deliver, ended = Keeper._deliver, asyncio.Event()

    async def late(keeper: Keeper, *arguments: Any) -> Any:
        report = await deliver(keeper, *arguments)
        await ended.wait()
        return report

    monkeypatch.setattr(Keeper, "_deliver", late)
    async with fleet(2, recovery=Recovery(attempts=attempts, backoff=0.01, longest=0.01, steady=60)) as engine:
        await engine.refit_to(1)
        await until(lambda: serving(engine))
        await dead(engine)
        await until(lambda: engine.replicas[0].incarnation == 2 and serving(engine))
        await dead(engine)
        await asyncio.sleep(0.1)
        assert (engine.phase(), engine.replicas[0].incarnation) == (Phase.DEAD, 2)
        ended.set()
        await until(lambda: not engine._keeper.hopeful)
        await asyncio.sleep(0.1)
        wanted = (Phase.DEAD, 2) if attempts == 1 else (Phase.SERVING, 3)
        assert (engine.phase(), engine.replicas[0].incarnation) == wanted


async def test_one_that_dies_between_its_boot_and_its_refit_has_used_up_that_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(keeper: Keeper, *_: Any) -> None:
        keeper._delivering = False

    monkeypatch.setattr(Keeper, "_refit", never)
    async with fleet(2, recovery=Recovery(attempts=1, backoff=0.01, longest=0.01, steady=60)) as engine:
        await engine.refit_to(1)
        await dead(engine)
        await until(lambda: (engine.replicas[0].incarnation, engine.phase()) == (2, Phase.IDLE))
        await dead(engine)
        await until(lambda: not engine._keeper.hopeful)
        await asyncio.sleep(0.1)
        assert (engine.phase(), engine.replicas[0].incarnation) == (Phase.DEAD, 2)


async def test_serving_steadily_forgets_earlier_tries() -> None:
    async with fleet(recovery=Recovery(attempts=1, backoff=0.01, steady=0.05)) as engine:
        await engine.refit_to(1)
        for life in range(1, 4):
            await until(lambda life=life: engine.replicas[0].incarnation == life and serving(engine))  # type: ignore[misc]
            await asyncio.sleep(0.1)
            engine.sims[0].die()
            await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        await until(lambda: serving(engine))


async def test_a_refit_that_comes_first_repairs_and_nothing_is_tried() -> None:
    async with fleet(2, recovery=QUICK, delays=Delays(call=0.01)) as engine:
        engine.sims[0].script.plan("apply", "raise")
        first = engine.refit_to(1)
        await engine.replicas[1].reached(frozenset({Phase.RECEIVING}))
        second = engine.refit_to(2)
        assert (await first).outcome is Outcome.PARTIAL
        assert (await second).outcome is Outcome.COMMITTED
        assert sorted((await second).replicas) == ["replica-0", "replica-1"]
        await asyncio.sleep(0.1)
        assert recoveries(engine) == 0
        assert {r.weight_version for r in engine.replicas} == {2}


async def test_a_replica_that_boots_for_long_holds_up_no_refit_of_the_others() -> None:
    async with fleet(2, recovery=QUICK) as engine:
        await engine.refit_to(1)
        engine.sims[0].delays.boot = 0.5
        engine.sims[0].die()
        await engine.replicas[0].reached(frozenset({Phase.STARTING}))
        began = time.monotonic()
        assert list((await engine.refit_to(2)).replicas) == ["replica-1"]
        assert time.monotonic() - began < 0.3
        await until(lambda: serving(engine))
        assert {r.weight_version for r in engine.replicas} == {2}


async def test_with_nothing_at_hand_requests_do_not_wait_and_the_next_refit_repairs() -> None:
    async with fleet(recovery=QUICK) as engine:
        engine.sims[0].die()
        await until(lambda: engine.phase() is Phase.IDLE)
        with pytest.raises(NotServing, match="no longer at hand"):
            await asyncio.wait_for(engine.generate([1], FIVE), 5)
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED
        assert (await engine.generate([1], FIVE)).spans == ((1, 0, 5),)


async def test_nothing_is_booted_while_the_fleet_sleeps() -> None:
    async with fleet(2, recovery=QUICK, checkpoints={"base": 0}, origin="base") as engine:
        await engine.sleep(1)
        engine.sims[0].die()
        await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        await asyncio.sleep(0.1)
        assert engine.phase() is Phase.DEAD
        with pytest.raises(NotServing, match="wake_up"):
            await engine.generate([1], FIVE)
        await engine.wake_up()
        await until(lambda: serving(engine))


async def test_a_replica_that_was_put_to_sleep_on_its_way_back_comes_back_after_it() -> None:
    async with fleet(2, recovery=QUICK, checkpoints={"base": 0}, origin="base") as engine:
        engine.sims[0].delays.boot = 0.1
        engine.sims[0].die()
        await engine.replicas[0].reached(frozenset({Phase.STARTING}))
        await engine.sleep(1)
        assert {engine.phase(n) for n in range(2)} == {Phase.SLEEPING}
        await engine.wake_up()
        await until(lambda: serving(engine))


async def test_a_restart_by_hand_and_one_by_itself_boot_once() -> None:
    async with fleet(recovery=QUICK, checkpoints={"base": 0}, origin="base") as engine:
        engine.sims[0].delays.boot = 0.05
        engine.sims[0].die()
        await engine.restart()
        await engine.recover()
        assert (engine.replicas[0].incarnation, engine.phase()) == (2, Phase.SERVING)


async def test_closing_ends_a_recovery_wherever_it_is() -> None:
    for delay in (0.0, 0.01, 0.03, 0.06):
        before = asyncio.all_tasks()
        engine = fleet(2, recovery=QUICK, delays=Delays(step=0.01, call=0.01), checkpoints={"base": 0}, origin="base")
        async with engine:
            engine.sims[0].delays.boot = 0.02
            engine.sims[0].die()
            waiting = asyncio.create_task(engine.generate([1], LONG))
            await asyncio.sleep(delay)
            async with asyncio.timeout(5):
                await engine.aclose()
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], PitstopError)
        assert asyncio.all_tasks() == before


async def test_a_recovery_that_fails_clean_is_tried_again_after_a_pause() -> None:
    async with fleet(2, recovery=QUICK) as engine:
        await engine.refit_to(1)
        engine.sims[0].script.plan("receive", "raise", "raise")
        engine.sims[0].die()
        await until(lambda: engine.replicas[0].incarnation == 2 and serving(engine))
        assert recoveries(engine) == 3
        assert engine.replicas[0].weight_version == 1


async def test_manual_recovery_does_nothing_by_itself() -> None:
    async with fleet(checkpoints={"base": 0}, origin="base") as engine:
        await dead(engine)
        await asyncio.sleep(0.05)
        assert engine.phase() is Phase.DEAD
        with pytest.raises(NotServing, match="a restart and a refit"):
            await engine.generate([1], FIVE)


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"backoff": 0}, {"backoff": 9, "longest": 1}, {"steady": -1}])
def test_options_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedPolicy):
        Recovery(**bad)


def test_a_recovery_of_another_name_is_refused() -> None:
    with pytest.raises(UnsupportedPolicy, match="recovery 'often'"):
        RolloutEngine.launch("nowhere", recovery="often")  # type: ignore[arg-type]


# -- the fate of requests on a replica that is lost --------------------------------------------------------


@pytest.mark.parametrize("how", ["die", "torn", "die while held"])
async def test_requests_mid_stream_waiting_in_the_engine_and_held_end_with_the_typed_error(how: str) -> None:
    async with fleet(delays=Delays(step=0.02), recovery=SLOW) as engine:
        stream = engine.stream([1], LONG)
        first = await anext(stream)
        whole = asyncio.create_task(engine.generate_async([[2]], LONG).__anext__())
        waiting = asyncio.create_task(engine.generate([3], LONG))  # in the engine, without a token
        await asyncio.sleep(0)
        await until(lambda: len(engine.sims[0].legs) == 3)
        kind: type[PitstopError] = ReplicaDied
        if how == "die":
            engine.sims[0].die()
        else:
            kind = RemoteError if how == "torn" else ReplicaDied
            engine.sims[0].script.plan("finalize", "raise" if how == "torn" else "die")
            with pytest.raises(kind):
                await engine.refit_to(1, RefitOptions(policy="keep"))
        tokens = list(first.token_ids)
        with pytest.raises(kind):  # noqa: PT012 - it raises after its last chunk
            async for chunk in stream:
                tokens += chunk.token_ids
        assert tokens == expected([1], [(0, 0, len(tokens))])
        assert stream.finish_reason == "error"
        _, done = await whole
        assert isinstance(done.error, kind)
        assert list(done.token_ids) == expected([2], done.spans)
        with pytest.raises(kind):
            await waiting
        assert not engine.replicas[0].flights


async def test_a_request_on_its_way_into_an_engine_that_dies_is_taken_by_another() -> None:
    async with fleet(2, delays=Delays(call=0.05)) as engine:
        tasks = [asyncio.create_task(engine.generate([n], FIVE)) for n in range(4)]
        await until(lambda: engine.replicas[0].gate.leases == 2)
        engine.sims[0].die()
        done = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert {c.replica for c in done} == {"replica-1"}
        assert all(list(c.token_ids) == expected(c.prompt_token_ids, c.spans) for c in done)


async def test_a_request_on_its_way_into_the_only_engine_waits_for_it_to_come_back_or_says_what_is_missing() -> None:
    async with fleet(recovery=QUICK, delays=Delays(call=0.02), checkpoints={"base": 0}, origin="base") as engine:
        task = asyncio.create_task(engine.generate([1], FIVE))
        await until(lambda: engine.replicas[0].gate.leases)
        engine.sims[0].die()
        assert (await asyncio.wait_for(task, 5)).spans == ((0, 0, 5),)
    async with fleet(delays=Delays(call=0.02)) as engine:
        task = asyncio.create_task(engine.generate([1], FIVE))
        await until(lambda: engine.replicas[0].gate.leases)
        engine.sims[0].die()
        with pytest.raises(NotServing, match="its engine died"):
            await asyncio.wait_for(task, 5)


async def test_a_request_in_the_gate_when_the_refit_tears_waits_for_the_repair() -> None:
    async with fleet(recovery=QUICK, delays=Delays(call=0.02)) as engine:
        engine.sims[0].script.plan("apply", "raise")
        handle = engine.refit_to(1)
        await engine.replicas[0].reached(frozenset({Phase.RECEIVING}))
        task = asyncio.create_task(engine.generate([1], FIVE))
        with pytest.raises(RemoteError):
            await handle
        assert (await asyncio.wait_for(task, 5)).spans == ((1, 0, 5),)


async def test_a_storm_of_deaths_and_torn_refits_is_weathered_without_a_hand() -> None:
    limits = Deadlines(suspend=0.2, receive=0.2, receive_per_gib=0, finalize=0.2, resume=0.2, control=0.2, silence=0.2)
    eager = Recovery(attempts=50, backoff=0.01, longest=0.02)
    async with fleet(3, recovery=eager, delays=Delays(step=0.001)) as engine:
        for version in range(1, 60):
            sim = engine.sims[version % 3]
            if version % 4 == 0:
                sim.die()
            elif version % 4 == 1:
                sim.script.plan(("apply", "finalize", "resume", "receive")[version % 3], "raise")
            task = asyncio.create_task(engine.generate([version], FIVE))
            handle = engine.refit_to(version, RefitOptions(deadlines=limits))
            await asyncio.wait({asyncio.ensure_future(_ended(handle))}, timeout=5)
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                assert list(done.token_ids) == expected([version], done.spans)
        await until(lambda: serving(engine))
        assert not any(r.flights for r in engine.replicas)


async def _ended(handle: Any) -> None:
    with contextlib.suppress(PitstopError):
        await handle
