"""Faults met in the field, on simulated engines. Each test names its row; `tests/FIELD_FAULTS.md` lists all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import time
from collections.abc import Mapping

import pytest

from pitstop.engine.errors import NotServing, OfferRejected, PitstopError, StaleVersion
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import POLICIES, Deadlines, Outcome, Policy, RefitOptions
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import TORN, Delays, SimulatedBackend
from tests.engine.sim import SimFleet, expected, fleet, until

FIVE = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=400)


class _Memory(SimulatedBackend):
    """Weights become NaN (`TORN`) at a discarding sleep, and a step after memory was given back is an offence."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.given_back = False
        self.offences = 0

    async def sleep(self, level: int) -> None:
        self.offences += not self.paused
        await super().sleep(level)
        self.given_back = True

    async def wake(self, *, kv_cache: bool) -> None:
        if kv_cache:
            self.given_back = False
        await super().wake(kv_cache=kv_cache)

    def _step(self) -> None:
        self.offences += self.given_back
        super()._step()


async def test_b09_after_a_discarding_sleep_nothing_is_served_before_one_whole_refit() -> None:
    backend = _Memory()
    async with SimFleet([backend]) as engine:
        await engine.sleep(2)
        with pytest.raises(NotServing, match=r"wake_up\(\) is missing"):
            await engine.generate([1], FIVE)
        await engine.wake_up()
        assert backend.live == dict.fromkeys("abc"), "wake brings back memory, not content"
        with pytest.raises(NotServing, match="a full refit is missing"):
            await engine.generate([1], FIVE)
        backend.script.plan("apply", "raise")
        with pytest.raises(PitstopError, match="apply"):
            await engine.refit_to(1)
        with pytest.raises(NotServing, match="a full refit is missing"):
            await engine.generate([1], FIVE)
        handle = engine.refit_to(2)
        done = await engine.generate([1], FIVE)  # queued until the refit has finished
        assert (await handle).outcome is Outcome.COMMITTED
        assert (done.spans, TORN in done.token_ids) == (((2, 0, 5),), False)
        assert backend.offences == 0


@pytest.mark.parametrize("policy", ["wait", "abort", "recompute"])
async def test_b21_no_step_runs_after_memory_was_given_back(policy: str) -> None:
    backend = _Memory(delays=Delays(step=0.001))
    async with SimFleet([backend]) as engine:
        params = SamplingParams(max_tokens=60)
        live = [asyncio.create_task(engine.generate([n], params)) for n in range(6)]
        await until(lambda: len(backend.legs) == 6 and backend.steps > 3)
        sleeping = asyncio.create_task(engine.sleep(1, policy=policy))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate([9], FIVE))
        await sleeping
        steps = backend.steps
        with pytest.raises(NotServing, match="wake_up"):
            await asyncio.wait_for(late, 5)
        with pytest.raises(NotServing, match="wake_up"):
            await engine.generate([8], FIVE)
        await asyncio.sleep(0.02)
        assert (backend.steps, backend.offences) == (steps, 0)
        await engine.wake_up()
        done = await asyncio.gather(*live)
        reason = "abort" if policy == "abort" else "length"
        assert {c.finish_reason for c in done} == {reason}
        assert all(list(c.token_ids) == expected(c.prompt_token_ids, c.spans) for c in done)
        assert backend.offences == 0


@pytest.mark.parametrize("partial", [False, True])
async def test_b27_what_is_aborted_is_never_continued_and_what_continues_says_which_weights_made_it(
    partial: bool,
) -> None:
    policy: Policy = "recompute" if partial else "abort"
    async with fleet(delays=Delays(step=0.001)) as engine:
        tasks = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=200))) for n in range(8)]
        for version in range(1, 5):
            await asyncio.sleep(0.02)
            await engine.refit_to(version, RefitOptions(policy=policy))
        done = await asyncio.gather(*tasks)
        for c in done:
            assert list(c.token_ids) == expected(c.prompt_token_ids, c.spans)
            assert [s.start for s in c.spans] == [0, *(s.end for s in c.spans[:-1])]
            assert c.spans[-1].end == len(c.token_ids)
        if partial:
            assert {tuple(s.weight_version for s in c.spans) for c in done} == {(0, 1, 2, 3, 4)}
        else:
            assert {len(c.spans) for c in done} == {1}
            assert {c.finish_reason for c in done} == {"abort"}


async def test_b31_a_version_bump_under_keep_aborts_nothing() -> None:
    async with fleet(delays=Delays(step=0.001)) as engine:
        tasks = [asyncio.create_task(engine.generate([n], LONG)) for n in range(16)]
        await until(lambda: engine.sims[0].steps > 20)
        await engine.refit_to(1, RefitOptions(policy="keep"))
        done = await asyncio.gather(*tasks)
        assert engine.sims[0].aborts == 0
        assert {(c.finish_reason, len(c.token_ids), len(c.spans)) for c in done} == {("length", 400, 2)}


class _OwnCancel(Exception):
    """A cancellation in some library's own words."""


@pytest.mark.parametrize(
    "raised",
    [asyncio.CancelledError(), concurrent.futures.CancelledError(), _OwnCancel("cancelled"), TimeoutError("late")],
    ids=lambda error: type(error).__module__ + "." + type(error).__name__,
)
async def test_b49_whatever_a_suspend_is_cancelled_with_the_service_goes_on(raised: BaseException) -> None:
    class Cancels(SimulatedBackend):
        raises: BaseException | None = raised

        async def suspend(self, policy: Policy) -> Mapping[str, int]:
            error, self.raises = self.raises, None
            if error is not None:
                raise error
            return await super().suspend(policy)

    async with SimFleet([Cancels(delays=Delays(step=0.001))]) as engine:
        task = asyncio.create_task(engine.generate([1], LONG))
        await until(lambda: engine.sims[0].steps > 3)
        with pytest.raises(PitstopError):
            await asyncio.wait_for(_report(engine, 1), 5)
        assert engine.weight_version == 0
        assert (await engine.refit_to(2)).outcome is Outcome.COMMITTED
        assert {s.weight_version for s in (await task).spans} == {0, 2}
        # The user's own cancel still cancels the user's call.
        mine = asyncio.create_task(engine.generate([1], LONG))
        await asyncio.sleep(0.01)
        mine.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mine


async def _report(engine: SimFleet, version: int) -> None:
    await engine.refit_to(version)


async def test_b51_a_storm_of_cancels_leaves_no_slot_taken_and_none_given_twice() -> None:
    async with fleet(delays=Delays(step=0.001, call=0.001)) as engine:
        replica, rng = engine.replicas[0], random.Random(0)
        storm = True

        async def cancel_all() -> None:
            while storm:
                await asyncio.sleep(rng.uniform(0, 0.01))
                engine.abort()

        cancelling = asyncio.create_task(cancel_all())
        for _ in range(5):
            tasks = [asyncio.create_task(engine.generate([n], LONG)) for n in range(100)]
            for task in rng.sample(tasks, 60):
                await asyncio.sleep(rng.choice([0, 0, 0.0005]))
                task.cancel()
                assert replica.gate.leases >= 0
            await engine.refit_to((engine.weight_version or 0) + 1)
            await asyncio.gather(*tasks, return_exceptions=True)
        storm = False
        await cancelling
        await until(lambda: not engine.sims[0].legs)
        assert (replica.gate.leases, replica.load, len(replica.flights)) == (0, 0, 0)
        assert {(await engine.generate([n], FIVE)).finish_reason for n in range(4)} == {"length"}


async def test_b61_a_request_aborted_in_the_tick_of_its_natural_end_holds_up_no_suspend() -> None:
    async with fleet() as engine:
        for version in range(1, 101):
            tasks = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=n % 3 + 1))) for n in range(5)]
            for _ in range(version % 7):
                await asyncio.sleep(0)
            engine.abort()
            policy = POLICIES[version % 4]
            async with asyncio.timeout(2):
                await engine.refit_to(version, RefitOptions(policy=policy))
                await asyncio.gather(*tasks)
        assert not engine.sims[0].legs


class _Busy(SimulatedBackend):
    """Answers nobody while it loads, as an engine that loads in its own thread of control does."""

    def __init__(self) -> None:
        super().__init__(delays=Delays(step=0.001))
        self.load_seconds = 0.0
        self.loading = asyncio.Event()
        self.loading.set()

    async def call_workers(self, op):  # type: ignore[no-untyped-def]
        if op.verb == "apply":
            self.loading.clear()
            await asyncio.sleep(self.load_seconds)
            self.loading.set()
        await self.loading.wait()
        return await super().call_workers(op)


async def test_b73_an_engine_that_is_busy_with_its_refit_is_not_taken_for_dead_and_a_stuck_one_is() -> None:
    backend = _Busy()
    async with SimFleet([backend]) as engine:
        replica = engine.replicas[0]
        replica.silence = 0.1
        backend.load_seconds = 0.6
        stream = asyncio.create_task(engine.generate([1], LONG))
        await until(lambda: backend.steps > 3)
        handle = engine.refit_to(1)
        seen = set()
        while not handle.done():
            began = time.monotonic()
            seen.add(engine.replicas[0].phase)
            assert time.monotonic() - began < 0.1
            await asyncio.sleep(0.02)
        assert Phase.RECEIVING in seen
        assert (await handle).outcome is Outcome.COMMITTED
        assert (replica.incarnation, (await stream).finish_reason) == (1, "length")
        backend.load_seconds = 60
        limit = Deadlines(receive=0.5, receive_per_gib=0, control=0.3, finalize=0.3)
        began = time.monotonic()
        with pytest.raises(PitstopError, match=r"receive did not end within 0.5 s"):
            await engine.refit_to(2, RefitOptions(deadlines=limit))
        assert 0.5 <= time.monotonic() - began < 2.5
        assert engine.phase() is Phase.QUARANTINED


async def test_b75_a_version_that_comes_again_or_goes_back_is_refused_unless_it_is_a_rebase() -> None:
    async with fleet(2, checkpoints={"other": 58}) as engine:
        await engine.refit_to(57)
        old = await engine.generate([1], FIVE)
        with pytest.raises(StaleVersion, match="rebase=True"):
            await engine.refit_to(1)
        with pytest.raises(StaleVersion):
            await engine.refit_to(57)
        engine.sims[0].die()
        await engine.replicas[0].reached(frozenset({Phase.DEAD}))
        await engine.restart()
        with pytest.raises(OfferRejected, match="with other content"):
            await engine.refit_from("other", 57)
        await engine.refit_to(1, RefitOptions(rebase=True))
        assert (engine.staleness(old), engine.weight_version) == (1, 1)


async def test_b77_a_stop_right_after_or_during_a_start_is_a_clean_end() -> None:
    for n in range(100):
        before = asyncio.all_tasks()
        engine = fleet(2, delays=Delays(boot=0.01))
        starting = asyncio.create_task(engine.__aenter__())
        for _ in range(n % 10):
            await asyncio.sleep(0)
        if n % 10 == 9:
            await asyncio.sleep(0.005)
        async with asyncio.timeout(2):
            await engine.aclose()
            await engine.aclose()
            await asyncio.gather(starting, return_exceptions=True)
            await engine.aclose()
        assert asyncio.all_tasks() == before


async def test_b81_a_wake_that_fails_leaves_an_engine_that_a_restart_brings_back() -> None:
    async with fleet(2, checkpoints={"base": 0}, origin="base") as engine:
        for _ in range(3):
            await engine.sleep(1)
            engine.sims[0].script.plan("wake", "raise")
            with pytest.raises(PitstopError, match="scripted: wake"):
                await engine.wake_up()
            # No half-woken engine: it was closed, with all that it had mapped.
            assert engine.phase() is Phase.DEAD
            assert engine.replicas[0].weight_version is None
            assert engine.phase(1) is Phase.SERVING
            await engine.recover()
            assert {engine.phase(n) for n in range(2)} == {Phase.SERVING}


async def test_b85_new_work_starts_at_once_after_a_sync_though_an_old_request_goes_on() -> None:
    async with fleet(4, delays=Delays(step=0.002)) as engine:
        long = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=4000)))
        await until(lambda: any(sim.steps > 3 for sim in engine.sims))
        await engine.refit_to(1, RefitOptions(policy="keep"))
        began = time.monotonic()
        done = await asyncio.gather(*(engine.generate([n], SamplingParams(max_tokens=2)) for n in range(20)))
        assert time.monotonic() - began < 0.5
        assert {c.spans for c in done} == {((1, 0, 2),)}
        assert not long.done()
        assert engine.abort() == 1
        assert [s.weight_version for s in (await long).spans] == [0, 1]


async def test_b69_every_rank_of_every_replica_is_reached_also_after_one_was_replaced() -> None:
    async with SimFleet([SimulatedBackend(world_size=2) for _ in range(3)]) as engine:
        await engine.refit_to(1)
        for version in (2, 3):
            engine.sims[1].die()
            await engine.replicas[1].reached(frozenset({Phase.DEAD}))
            # Nobody waits for the one that is gone.
            report = await asyncio.wait_for(_whole(engine, version), 2)
            assert set(report) == {"replica-0", "replica-2"}
            await engine.restart()
            await engine.recover()
            layouts = [(w.replica, w.incarnation, w.rank) for r in engine.replicas for w in r.layout]
            assert len(set(layouts)) == 6
            assert {r.weight_version for r in engine.replicas} == {version}
            assert [set(sim.live.values()) for sim in engine.sims] == [{version}] * 3


async def _whole(engine: SimFleet, version: int) -> list[str]:
    report = await engine.refit_to(version)
    assert all(part.committed for part in report.replicas.values())
    return list(report.replicas)
