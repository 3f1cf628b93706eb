"""Faults of engines, refits, services and callers, on simulated engines: everything ends, and says why."""

from __future__ import annotations

import asyncio

import pytest

from pitstop.engine.errors import (
    DeadlineExceeded,
    EngineClosed,
    NotServing,
    RemoteError,
    ReplicaDied,
)
from pitstop.engine.handle import RefitHandle
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import NullObserver, Transition
from pitstop.engine.refit import Outcome
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import Delays, Script, SimulatedBackend
from pitstop.engine.stream import Stream
from tests.engine.sim import SimFleet, fleet

FIVE = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=400)


async def test_recover_brings_dead_and_quarantined_replicas_back_without_the_trainer() -> None:
    async with fleet(3) as engine:
        engine.sims[1].script.plan("apply", "raise")
        assert (await engine.refit_to(4)).outcome is Outcome.PARTIAL
        engine.sims[2].die()
        await engine.replicas[2].reached(frozenset({Phase.DEAD}))
        report = await engine.recover()
        assert report is not None
        assert set(report.replicas) == {"replica-1", "replica-2"}
        assert {engine.phase(n) for n in range(3)} == {Phase.SERVING}
        assert {r.weight_version for r in engine.replicas} == {4}
        assert await engine.recover() is None


async def test_what_fails_the_trainer_names_each_replica_that_it_fails() -> None:
    async with fleet(2) as engine:
        script = Script()
        script.plan("send", "raise")
        handle = engine.refit_to(1, script=script)
        with pytest.raises(RemoteError) as caught:
            await handle
        assert "replica" not in caught.value.fields
        assert handle.report is not None
        for name, part in handle.report.replicas.items():
            assert part.error is not None
            assert part.error.fields["replica"] == name
            assert (part.error.slug, part.error.message) == (caught.value.slug, caught.value.message)


async def test_recover_says_what_to_do_when_the_version_is_gone() -> None:
    async with fleet(2) as engine:
        engine.sims[0].die()
        await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        with pytest.raises(NotServing, match="publish it again"):
            await engine.recover()
        assert engine.phase() is Phase.IDLE


async def test_a_stream_closed_by_another_task_ends_and_leaves_nothing_in_the_engine() -> None:
    for delay in (0.0, 0.005, 0.03):
        async with fleet(delays=Delays(step=0.001, call=0.01)) as engine:
            stream = engine.stream([1], LONG)

            async def read(stream: Stream = stream) -> int:
                return sum([len(chunk.token_ids) async for chunk in stream])

            reading = asyncio.create_task(read())
            await asyncio.sleep(delay)
            await stream.aclose()
            assert await asyncio.wait_for(reading, 5) < 400
            await asyncio.sleep(0.02)
            assert not engine.sims[0].legs
            assert not engine.replicas[0].flights


async def test_an_engine_that_freezes_is_given_up_and_its_requests_end() -> None:
    async with fleet(2, delays=Delays(step=0.001)) as engine:
        for replica in engine.replicas:
            replica.silence = 0.2
        tasks = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=600))) for n in range(4)]
        await asyncio.sleep(0.02)
        engine.sims[0].paused = True
        engine.sims[0].script.plan("describe", "hang")
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert sorted(type(d).__name__ for d in done) == [
            "Completion",
            "Completion",
            "DeadlineExceeded",
            "DeadlineExceeded",
        ]
        assert engine.phase() is Phase.DEAD


async def test_an_engine_that_is_slow_but_answers_lives_on() -> None:
    async with fleet(delays=Delays(step=0.3)) as engine:
        engine.replicas[0].silence = 0.2
        assert (await engine.generate([1], SamplingParams(max_tokens=3))).finish_reason == "length"


@pytest.mark.parametrize("ends", ["send", "land", "apply"])
async def test_a_request_that_waits_for_a_refit_ends_when_the_refit_fails(ends: str) -> None:
    async with fleet(weight_version=None, delays=Delays(call=0.005)) as engine:
        script = Script()
        if ends == "send":
            script.plan("send", "raise")
        else:
            (engine.transport if ends == "land" else engine.sims[0]).script.plan(ends, "raise")
        handle = engine.refit_to(1, script=script)
        request = asyncio.create_task(engine.generate([1], FIVE))
        with pytest.raises(Exception, match="scripted"):
            await handle
        with pytest.raises(NotServing, match="a full refit is missing"):
            await asyncio.wait_for(request, 5)


async def test_abort_reaches_a_request_that_waits_for_admission() -> None:
    async with fleet(delays=Delays(call=0.05)) as engine:
        handle = engine.refit_to(1)
        await engine.replicas[0].reached(frozenset({Phase.RECEIVING}))
        waiting = asyncio.create_task(engine.generate([1], FIVE))
        await asyncio.sleep(0.01)
        assert engine.abort() == 1
        assert (await asyncio.wait_for(waiting, 5)).finish_reason == "abort"
        assert engine.abort() == 0
        await handle


async def test_closing_ends_every_handle_whether_judged_pending_or_running() -> None:
    engine = fleet(delays=Delays(call=0.05))
    async with engine:
        handles = [engine.refit_to(1)]
        await engine.replicas[0].reached(frozenset({Phase.SUSPENDING}))
        handles += [engine.refit_to(2), engine.refit_to(3)]
        await asyncio.sleep(0)
    for handle in handles:
        with pytest.raises(Exception, match="closed"):
            await asyncio.wait_for(_result(handle), 5)


async def _result(handle: RefitHandle) -> None:
    assert (await handle).outcome is not Outcome.SUPERSEDED, "closed"


async def test_a_failing_service_closes_the_engine_in_order_and_says_why() -> None:
    broken = asyncio.Event()

    async def service() -> None:
        await broken.wait()
        raise OSError("the link broke")

    engine = fleet(delays=Delays(step=0.001))
    engine._services = [service]
    await engine.__aenter__()
    task = asyncio.create_task(engine.generate([1], LONG))
    await asyncio.sleep(0.01)
    broken.set()
    with pytest.raises(EngineClosed):
        await task
    with pytest.raises(RemoteError, match="the link broke"):
        await engine.aclose()
    assert engine.phase() is Phase.STOPPED


async def test_an_observer_that_raises_changes_nothing() -> None:
    class Raises(NullObserver):
        def transition(self, change: Transition) -> None:
            raise RuntimeError("observer")

    async with SimFleet([SimulatedBackend()], Raises()) as engine:
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED


async def test_restart_right_after_a_stream_has_raised_restarts() -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        task = asyncio.create_task(engine.generate([1], LONG))
        await asyncio.sleep(0.01)
        engine.sims[0].die()
        with pytest.raises(ReplicaDied):
            await task
        await engine.restart()
        assert (engine.phase(), engine.replicas[0].incarnation) == (Phase.IDLE, 2)


async def test_a_sleep_that_fails_before_memory_is_given_back_changes_nothing() -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        engine.sims[0].script.plan("suspend", "raise")
        task = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=50)))
        await asyncio.sleep(0.01)
        with pytest.raises(RemoteError, match="scripted: suspend"):
            await engine.sleep(1)
        assert engine.phase() is Phase.SERVING
        assert (await task).spans == ((0, 0, 50),)


@pytest.mark.parametrize("bad", [None, 7, [float("inf")], {"prompt_token_ids": 5}, object(), ["1"], [1.5], b"ab"])
async def test_a_prompt_that_cannot_be_rendered_fails_alone(bad: object) -> None:
    async with fleet() as engine:
        got = {i: c async for i, c in engine.generate_async([[1], bad, [2]], FIVE)}  # type: ignore[list-item]
        assert [got[i].finish_reason for i in range(3)] == ["length", "error", "length"]


async def test_an_engine_that_does_not_take_a_request_costs_its_limit_and_blocks_no_refit_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by the soak: the request hung for ever, and every later refit of its replica failed."""
    monkeypatch.setattr("pitstop.engine.fleet.SUBMIT_SECONDS", 0.1)
    async with fleet() as engine:
        engine.sims[0].script.plan("submit", "hang")
        with pytest.raises(DeadlineExceeded, match=r"replica-0 did not take request .* within 0.1 s"):
            await asyncio.wait_for(engine.generate([1], FIVE), 5)
        assert engine.replicas[0].gate.leases == 0
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED
        assert (await engine.generate([1], FIVE)).spans == ((1, 0, 5),)


async def test_an_engine_that_freezes_while_it_takes_a_request_is_given_up() -> None:
    async with fleet() as engine:
        engine.replicas[0].silence = 0.2
        engine.sims[0].script.plan("submit", "hang")
        engine.sims[0].script.plan("describe", "hang")
        request = asyncio.create_task(engine.generate([1], FIVE))
        await asyncio.wait_for(engine.replicas[0].reached(frozenset({Phase.DEAD})), 5)
        request.cancel()


async def test_a_refit_whose_replicas_have_all_died_does_not_wait_for_the_trainer_to_send_the_rest() -> None:
    async with fleet(2) as engine:
        script = Script()
        script.plan("send", "hang")
        handle = engine.refit_to(1, script=script)  # whose receive limit is two minutes
        await asyncio.sleep(0.05)
        for sim in engine.sims:
            sim.die()
        async with asyncio.timeout(5):
            with pytest.raises(ReplicaDied):
                await handle
        assert handle.report is not None
        assert {part.error.slug for part in handle.report.replicas.values() if part.error} == {"replica_died"}
