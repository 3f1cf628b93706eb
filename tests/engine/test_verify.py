"""Drift of live weights, found on request: what is remembered of a commit, and what becomes of who has drifted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pitstop.engine import prints
from pitstop.engine.drift import Drifted, Reading, Remembered
from pitstop.engine.errors import PitstopError, ReadingCutShort, RemoteError, WeightsDrifted
from pitstop.engine.handle import RefitHandle
from pitstop.engine.ledger import Commit, Ledger
from pitstop.engine.lifecycle import Phase
from pitstop.engine.recovery import Recovery
from pitstop.engine.refit import Outcome
from pitstop.engine.request import Request, SamplingParams
from pitstop.engine.simulated import TORN, Delays, SimulatedBackend, SimulatedLeg
from pitstop.engine.worker_ports import WorkerOp, WorkerReply
from tests.engine.sim import SimFleet, fleet, until

FIVE = SamplingParams(max_tokens=5)


class _Slow(SimulatedBackend):
    """Answers a reading only when it is told, and notes what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.slow = self.cut = False
        self.free = asyncio.Event()
        self.free.set()

    async def submit(self, request: Request) -> SimulatedLeg:
        await self.free.wait()
        return await super().submit(request)

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        if op.verb == "fingerprint":
            self.asked.append(op.refit_id)
            await self.free.wait()
            if self.cut:
                return [WorkerReply(0, error=ReadingCutShort("a refit came").record())]
            if self.slow:
                return [WorkerReply(0)]
        return await super().call_workers(op)


async def test_weights_that_stay_are_the_same_after_the_boot_and_after_each_commit() -> None:
    async with fleet(2, world_size=2) as engine:
        for version in (None, 1, 2):
            if version is not None:
                await engine.refit_to(version)
            report = await engine.verify()
            assert [check.state for check in report.replicas.values()] == ["same", "same"]
            check = report.replicas["replica-0"]
            assert (check.weight_version, check.tensors, check.nbytes, check.checkpoint_nbytes) == (
                version or 0, 6, 96, 48,
            )  # fmt: skip


async def test_drift_quarantines_its_replica_ends_its_requests_with_the_error_and_a_refit_brings_it_back() -> None:
    async with fleet(2, delays=Delays(step=0.001)) as engine:
        await engine.refit_to(7)
        await engine.verify()
        long = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=4000))) for n in range(4)]
        await until(lambda: all(len(sim.legs) == 2 for sim in engine.sims))
        engine.sims[0].live["b"] = 6
        with pytest.raises(WeightsDrifted, match=r"replica-0: 1 live .* version 7 .*b \(rank 0\).*refit") as caught:
            await engine.verify()
        assert caught.value.fields == {
            "replica": "replica-0", "rank": 0, "tensor": "b", "count": 1, "weight_version": 7,
        }  # fmt: skip
        assert (engine.phase(0), engine.phase(1)) == (Phase.QUARANTINED, Phase.SERVING)
        assert engine.replicas[0].weight_version is None
        assert engine.sims[0].paused, "an engine out of service makes no token"
        await until(lambda: sum(task.done() for task in long) == 2)
        ended = [task.exception() for task in long if task.done()]
        assert all(isinstance(error, WeightsDrifted) for error in ended)
        done = [await engine.generate([n], FIVE) for n in range(4)]
        assert not any(TORN in completion.token_ids for completion in done)
        assert (await engine.verify()).unknown[0].why == "it is quarantined"
        assert (await engine.refit_to(8)).outcome is Outcome.COMMITTED
        assert [check.state for check in (await engine.verify()).replicas.values()] == ["same", "same"]
        assert engine.phase(0) is Phase.SERVING
        for task in long:
            task.cancel()


async def test_a_report_is_returned_instead_if_it_was_asked_for_and_the_replica_is_quarantined_all_the_same() -> None:
    async with fleet(1) as engine:
        await engine.verify()
        engine.sims[0].live |= {"a": 5, "c": 5}
        report = await engine.verify(raise_on_drift=False)
        assert [check.drifted for check in report.drifted] == [(Drifted(0, "a"), Drifted(0, "c"))]
        assert engine.phase() is Phase.QUARANTINED


async def test_automatic_recovery_brings_back_what_has_drifted() -> None:
    recovery = Recovery(backoff=0.01, longest=0.02)
    async with fleet(2, recovery=recovery) as engine:
        await engine.refit_to(3)
        await engine.verify()
        engine.sims[1].live["a"] = 99
        with pytest.raises(WeightsDrifted):
            await engine.verify()
        await until(lambda: engine.phase(1) is Phase.SERVING)
        assert set(engine.sims[1].live.values()) == {3}
        assert [check.state for check in (await engine.verify()).replicas.values()] == ["same", "same"]


async def test_a_reading_that_a_refit_overtakes_counts_for_neither_version() -> None:
    backend = _Slow()
    backend.slow = True
    async with SimFleet([backend]) as engine:
        await until(lambda: backend.asked)
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED
        backend.slow = False
        report = await engine.verify()
        assert report.replicas["replica-0"].state == "same"
        assert len(set(backend.asked)) == 3, "one of each commit, and one to compare"
        backend.live["b"] = 0
        with pytest.raises(WeightsDrifted):
            await engine.verify()


async def test_what_a_refit_did_not_let_be_read_is_unknown_and_is_read_when_the_refit_has_failed() -> None:
    backend = _Slow()
    backend.cut = True
    async with SimFleet([backend]) as engine:
        report = await engine.verify()
        assert report.unknown[0].why == "not remembered: a refit began before it could be read"
        backend.cut, cut = False, list(backend.asked)
        backend.script.plan("receive", "raise")
        with pytest.raises(RemoteError, match="scripted: receive"):
            await engine.refit_to(1)
        await until(lambda: len(backend.asked) > len(cut))
        assert (await engine.verify()).replicas["replica-0"].state == "same"


async def test_a_refit_that_passes_while_weights_are_compared_is_not_taken_for_drift() -> None:
    backend = _Slow()
    async with SimFleet([backend]) as engine:
        await engine.verify()
        backend.free.clear()
        asked = len(backend.asked)
        verifying = asyncio.create_task(engine.verify())
        await until(lambda: len(backend.asked) > asked)
        await engine.refit_to(1)
        backend.free.set()
        check = (await verifying).replicas["replica-0"]
        assert (check.state, check.why) == ("unknown", "replica-0 has been out of service while its weights were read")


async def test_requests_end_at_once_when_weights_drifted_though_another_is_still_on_its_way_in() -> None:
    async with fleet(1, delays=Delays(step=0.001)) as engine:
        await engine.verify()
        live = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=4000)))
        await until(lambda: engine.sims[0].steps > 3)
        engine.sims[0].live["a"] = 9
        with engine.replicas[0].gate.lease():
            verifying = asyncio.create_task(engine.verify(raise_on_drift=False))
            with pytest.raises(WeightsDrifted):
                await live
            assert not verifying.done()
        assert (await verifying).drifted


async def test_a_request_that_was_on_its_way_in_when_weights_drifted_ends_with_the_error_too() -> None:
    backend = _Slow()
    async with SimFleet([backend]) as engine:
        check = (await engine.verify()).replicas["replica-0"]
        backend.free.clear()
        late = asyncio.create_task(engine.generate([1], FIVE))
        await until(lambda: engine.replicas[0].gate.leases)
        commit = engine.replicas[0].commit
        assert commit is not None
        drifted = replace(check, state="drifted", drifted=(Drifted(0, "a"),)).error()
        parking = asyncio.create_task(engine.replicas[0].drifted(drifted, commit))
        await until(lambda: engine.phase() is Phase.QUARANTINED)
        backend.free.set()
        with pytest.raises(WeightsDrifted):
            await late
        await parking
        assert backend.steps == 0


async def test_a_reading_that_fails_is_said_and_harms_nobody() -> None:
    async with fleet(1) as engine:
        await engine.verify()
        engine.sims[0].script.plan("fingerprint", "raise")
        await engine.refit_to(1)
        check = (await engine.verify()).replicas["replica-0"]
        assert (check.state, check.why) == ("unknown", "not remembered: scripted: fingerprint")
        assert (await engine.generate([1], FIVE)).finish_reason == "length"


async def test_drift_that_a_refit_overtakes_is_quarantined_if_the_refit_fails_clean() -> None:
    async with fleet(1) as engine:
        await engine.verify()
        engine.sims[0].live["a"] = 9
        engine.sims[0].script.plan("suspend", "raise")
        replica = engine.replicas[0]
        refits: list[RefitHandle] = []
        quarantine = replica.drifted

        async def late(error: PitstopError, commit: Commit) -> None:
            if not refits:
                refits.append(engine.refit_to(1))
                await replica.reached(frozenset({Phase.SUSPENDING}))
            await quarantine(error, commit)

        replica.drifted = late  # type: ignore[method-assign]
        await engine.verify(raise_on_drift=False)
        with pytest.raises(RemoteError, match="scripted: suspend"):
            await refits[0]
        await until(lambda: engine.phase() is Phase.QUARANTINED)
        assert engine.log.phases("replica-0")[2:] == ["suspending", "resuming", "serving", "quarantined"]


async def test_an_engine_that_cannot_be_stopped_after_its_weights_drifted_is_given_up() -> None:
    async with fleet(1) as engine:
        await engine.verify()
        engine.sims[0].live["a"] = 9
        engine.sims[0].script.plan("suspend", "raise")
        with pytest.raises(WeightsDrifted):
            await engine.verify()
        await until(lambda: engine.phase() is Phase.DEAD)


@pytest.mark.parametrize("how", ["sleep", "death", "torn"])
async def test_nothing_is_remembered_of_a_commit_that_was_revoked(how: str) -> None:
    async with fleet(1) as engine:
        await engine.verify()
        if how == "sleep":
            await engine.sleep(2)
            await engine.wake_up()
        elif how == "death":
            engine.sims[0].die()
            await until(lambda: engine.phase() is Phase.DEAD)
            await engine.restart()
        else:
            engine.sims[0].script.plan("apply", "raise")
            with pytest.raises(RemoteError, match="apply"):
                await engine.refit_to(1)
        state = {"sleep": "idle", "death": "idle", "torn": "quarantined"}[how]
        assert (await engine.verify()).replicas["replica-0"].why == f"it is {state}"
        await engine.refit_to(2)
        assert (await engine.verify()).replicas["replica-0"].state == "same"


def test_a_reading_is_of_one_commit_also_when_the_same_version_is_committed_again() -> None:
    ledger, remembered = Ledger(), Remembered()
    life = ledger.born("r")
    first = ledger.commit("r", life, 1)
    reading = Reading({0: {"a": "1"}}, {})
    remembered.keep(first, reading)
    assert remembered.of(first) is reading
    assert remembered.of(ledger.commit("r", life, 1)) is None


def test_a_tensor_that_is_there_once_only_has_drifted_too() -> None:
    one = Reading({0: {"a": "1", "b": "2"}, 1: {"a": "3"}}, {})
    other = Reading({0: {"a": "1"}, 1: {"a": "4"}}, {})
    assert one.differing(other) == other.differing(one) == (Drifted(0, "b"), Drifted(1, "a"))


class _Careful(SimulatedBackend):
    """Takes its time over a swap, and remembers in which phase its weights were read."""

    def __init__(self) -> None:
        super().__init__(delays=Delays(call=0.001))
        self.read_in: list[Phase] = []
        self.engine: SimFleet | None = None

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        if op.verb == "apply":
            await asyncio.sleep(0.2)
        if op.verb == "fingerprint" and self.engine is not None:
            self.read_in.append(self.engine.phase())
        return await super().call_workers(op)


async def test_what_a_resumed_engine_makes_first_comes_before_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _Slow()
    async with SimFleet([backend]) as engine:
        await engine.verify()
        monkeypatch.setattr(prints, "_SETTLING", 3600)
        backend.asked.clear()
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED
        await asyncio.sleep(0.05)
        assert backend.asked == []


async def test_nothing_begins_to_read_weights_that_a_refit_is_about_to_change() -> None:
    backend = _Careful()
    async with SimFleet([backend]) as engine:
        backend.engine = engine
        assert (await engine.refit_to(1)).outcome is Outcome.COMMITTED
        assert (await engine.refit_to(2)).outcome is Outcome.COMMITTED
        commit = engine.replicas[0].commit
        assert commit is not None
        await until(lambda: engine._upkeep.prints._remembered.of(commit))
        assert set(backend.read_in) == {Phase.SERVING}
