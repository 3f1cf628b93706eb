"""Receiving straight into a suspended replica: what serves is whole, and nobody waits for the lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pitstop.engine.errors import EngineClosed, PitstopError, RemoteError
from pitstop.engine.handle import RefitHandle
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import POLICIES, Deadlines, Outcome, Policy, RefitOptions, RefitReport
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import TORN, Delays, Fault, Script
from pitstop.engine.worker_ports import WorkerOp, WorkerReply
from tests.engine.sim import SimFleet, expected, fleet

IN_PLACE = RefitOptions(mode="in_place")
SHORT = RefitOptions(mode="in_place", deadlines=Deadlines(receive=0.3, receive_per_gib=0, control=0.1))
LONG = SamplingParams(max_tokens=120)
FIVE = SamplingParams(max_tokens=5)
BUSY = Delays(step=0.001)
SLOTS = pytest.mark.parametrize("slots", [0, 2], ids=["whole", "ring"])


def ringed(n: int = 1, slots: int = 2, **options: Any) -> SimFleet:
    engine = fleet(n, **options)
    engine.transport.slots = slots
    return engine


@SLOTS
@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_splits_its_streams_exactly_at_the_swap(policy: Policy, slots: int) -> None:
    async with ringed(2, slots, delays=BUSY) as engine:
        tasks = [asyncio.create_task(engine.generate([n], LONG)) for n in range(4)]
        await asyncio.sleep(0.02)
        report = await engine.refit_to(1, RefitOptions(policy=policy, mode="in_place"))
        assert (report.outcome, report.mode) == (Outcome.COMMITTED, "in_place")
        for n, made in enumerate(await asyncio.gather(*tasks)):
            assert list(made.token_ids) == expected([n], made.spans)
            versions = [version for version, _, _ in made.spans]
            if policy == "wait":
                assert made.spans == ((0, 0, 120),)
            elif policy == "abort":
                assert (made.finish_reason, versions) == ("abort", [0])
            else:
                assert (versions, made.spans[-1][2]) == ([0, 1], 120)
        for part in report.replicas.values():
            assert set(part.seconds) == {"suspend", "receive", "finalize", "resume"}
        assert (await engine.generate([9], FIVE)).spans == ((1, 0, 5),)
        assert engine.log.phases("replica-0")[-5:] == [
            "suspending", "receiving", "finalizing", "resuming", "serving",
        ]  # fmt: skip
        assert not [work for work in engine.log.works.values() if work.kind == "stage"]
        (end,) = (detail for key, _, detail in engine.log.ends if key.startswith("refit:"))
        assert end["mode"] == "in_place"


async def test_a_staged_refit_says_so_and_may_travel_through_a_ring() -> None:
    async with ringed(2) as engine:
        report = await engine.refit_to(1)
        assert (report.outcome, report.mode) == (Outcome.COMMITTED, "staged")
        assert all("stage" in part.seconds for part in report.replicas.values())


@SLOTS
async def test_replicas_that_serve_nothing_are_repaired_in_place(slots: int) -> None:
    async with ringed(2, slots, weight_version=None) as engine:
        engine.sims[1].script.plan("apply", "raise")
        assert (await engine.refit_to(1)).outcome is Outcome.PARTIAL
        assert engine.phase(1) is Phase.QUARANTINED
        report = await engine.refit_to(2, IN_PLACE)
        assert report.outcome is Outcome.COMMITTED
        assert "suspend" not in report.replicas["replica-1"].seconds
        assert {(await engine.generate([n], FIVE)).spans for n in range(2)} == {((2, 0, 5),)}


def at(n: int, fault: Fault) -> tuple[Fault | None, ...]:
    return (*(None for _ in range(n)), fault)


def unknowable(script: Script) -> None:
    script.plan("load", "raise")
    script.plan("undo", "raise")


FAILURES: list[tuple[str, Callable[[SimFleet], None], str, Phase]] = [
    ("order", lambda e: e.sims[0].script.plan("receive", "raise"), "remote_error", Phase.SERVING),
    ("order hangs", lambda e: e.sims[0].script.plan("receive", "hang"), "deadline_exceeded", Phase.SERVING),
    ("attach", lambda e: e.transport.script.plan("attach", "raise"), "remote_error", Phase.SERVING),
    ("attach hangs", lambda e: e.transport.script.plan("attach", "hang"), "deadline_exceeded", Phase.SERVING),
    ("first", lambda e: e.sims[0].script.plan("load", "raise"), "remote_error", Phase.SERVING),
    ("first hangs", lambda e: e.sims[0].script.plan("load", "hang"), "deadline_exceeded", Phase.SERVING),
    ("middle", lambda e: e.sims[0].script.plan("load", *at(1, "raise")), "remote_error", Phase.QUARANTINED),
    ("middle hangs", lambda e: e.sims[0].script.plan("load", *at(1, "hang")), "deadline_exceeded", Phase.QUARANTINED),
    ("last", lambda e: e.sims[0].script.plan("load", *at(2, "raise")), "remote_error", Phase.QUARANTINED),
    ("last hangs", lambda e: e.sims[0].script.plan("load", *at(2, "hang")), "deadline_exceeded", Phase.QUARANTINED),
    ("a lie", lambda e: e.sims[0].script.plan("load", *at(1, "lie")), "digest_mismatch", Phase.QUARANTINED),
    ("proof", lambda e: e.transport.script.plan("land", "raise"), "remote_error", Phase.QUARANTINED),
    ("proof hangs", lambda e: e.transport.script.plan("land", "hang"), "deadline_exceeded", Phase.QUARANTINED),
    ("check", lambda e: e.sims[0].script.plan("apply", "raise"), "remote_error", Phase.QUARANTINED),
    ("finalize", lambda e: e.sims[0].script.plan("finalize", "raise"), "remote_error", Phase.QUARANTINED),
    ("first dies", lambda e: e.sims[0].script.plan("load", "die"), "replica_died", Phase.DEAD),
    ("middle dies", lambda e: e.sims[0].script.plan("load", *at(1, "die")), "replica_died", Phase.DEAD),
    ("order dies", lambda e: e.sims[0].script.plan("receive", "die"), "replica_died", Phase.DEAD),
    ("suspend dies", lambda e: e.sims[0].script.plan("suspend", "die"), "replica_died", Phase.DEAD),
    ("suspend", lambda e: e.sims[0].script.plan("suspend", "raise"), "remote_error", Phase.SERVING),
    ("nobody can say", lambda e: unknowable(e.sims[0].script), "remote_error", Phase.QUARANTINED),
]  # fmt: skip


@SLOTS
@pytest.mark.parametrize(("cause", "slug", "left"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES])
async def test_a_replica_that_fails_holds_up_nobody_and_never_serves_torn(
    cause: Callable[[SimFleet], None], slug: str, left: Phase, slots: int
) -> None:
    async with ringed(2, slots, delays=BUSY) as engine:
        cause(engine)
        streams = [asyncio.create_task(engine.generate([n], LONG)) for n in range(4)]
        await asyncio.sleep(0.01)
        report = await within(engine.refit_to(1, SHORT))
        assert report.outcome is Outcome.PARTIAL
        ((lost, failed),) = ((n, part) for n, part in enumerate(report.replicas.values()) if not part.committed)
        assert failed.error is not None
        assert (failed.error.slug, engine.phase(lost)) == (slug, left)
        assert engine.replicas[lost].weight_version == (0 if left is Phase.SERVING else None)
        assert engine.phase(1 - lost) is Phase.SERVING
        ends = await asyncio.gather(*streams, return_exceptions=True)
        for n, end in enumerate(ends):
            if not isinstance(end, BaseException):
                assert list(end.token_ids) == expected([n], end.spans)
        errors = [end for end in ends if isinstance(end, BaseException)]
        assert len(errors) == (0 if left is Phase.SERVING else 2)
        assert all(isinstance(error, PitstopError) for error in errors)
        await repaired(engine)


@SLOTS
@pytest.mark.parametrize("fault", ["raise", "hang"])
@pytest.mark.parametrize("n", [0, 1, 2])
async def test_a_trainer_that_fails_half_way_leaves_every_replica_torn_or_as_it_was(
    n: int, fault: Fault, slots: int
) -> None:
    async with ringed(2, slots, delays=BUSY) as engine:
        script = Script()
        script.plan("fill" if slots else "send", *at(n if slots else 0, fault))
        stream = asyncio.create_task(engine.generate([1], LONG))
        await asyncio.sleep(0.01)
        report = await within(engine.refit_to(1, SHORT, script=script))
        assert report.outcome is Outcome.FAILED
        assert report.error is not None
        assert report.error.slug == ("remote_error" if fault == "raise" else "deadline_exceeded")
        torn = slots and n
        assert {engine.phase(0), engine.phase(1)} == {Phase.QUARANTINED if torn else Phase.SERVING}
        if torn:
            with pytest.raises(PitstopError):
                await stream
        else:
            assert (await stream).spans == ((0, 0, 120),)
        await repaired(engine)


async def test_content_that_contradicts_the_commit_is_torn_although_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ringed(2) as engine:
        engine.sims[1].script.plan("apply", "raise")
        await engine.refit_to(1)
        known = engine._coordinator._known
        known[next(iter(known))] = {"model.norm.weight": 1}
        report = await within(engine.refit_to(1, IN_PLACE))
        assert report.error is not None
        assert report.error.slug == "offer_rejected"
        assert [engine.phase(n) for n in range(2)] == [Phase.SERVING, Phase.QUARANTINED]
        await repaired(engine)


async def test_draining_eats_nothing_of_the_limit_for_receiving() -> None:
    async with ringed(2, delays=BUSY) as engine:
        slow = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=300)))
        await asyncio.sleep(0.01)
        limits = Deadlines(receive=0.15, receive_per_gib=0)
        report = await engine.refit_to(1, RefitOptions(policy="wait", mode="in_place", deadlines=limits))
        assert report.outcome is Outcome.COMMITTED
        assert max(part.seconds["suspend"] for part in report.replicas.values()) > 0.2
        assert (await slow).spans == ((0, 0, 300),)


async def test_a_replica_that_does_not_drain_fails_alone_and_clean() -> None:
    async with ringed(2, delays=BUSY) as engine:
        slow = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.01)
        limits = Deadlines(drain=0.1)
        report = await engine.refit_to(1, RefitOptions(policy="wait", mode="in_place", deadlines=limits))
        assert report.outcome is Outcome.PARTIAL
        assert (await slow).spans == ((0, 0, 400),)
        assert [engine.phase(n) for n in range(2)] == [Phase.SERVING] * 2


async def test_a_trainer_that_fails_while_replicas_drain_sets_them_free_at_once() -> None:
    async with ringed(2, slots=0, delays=BUSY) as engine:
        streams = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=2000))) for n in range(2)]
        await asyncio.sleep(0.01)
        script = Script()
        script.plan("send", "raise")
        report = await asyncio.wait_for(
            _report(engine.refit_to(1, RefitOptions(policy="wait", mode="in_place"), script=script)), 1
        )
        assert report.outcome is Outcome.FAILED
        assert {engine.phase(0), engine.phase(1)} <= {Phase.SERVING, Phase.RESUMING}
        assert (await engine.generate([9], FIVE)).spans == ((0, 0, 5),)
        for stream in streams:
            stream.cancel()


async def test_a_trainer_that_hangs_while_replicas_drain_costs_its_limit_and_not_theirs() -> None:
    async with ringed(2, slots=0, delays=BUSY) as engine:
        streams = [asyncio.create_task(engine.generate([n], SamplingParams(max_tokens=2000))) for n in range(2)]
        await asyncio.sleep(0.01)
        script = Script()
        script.plan("send", "hang")
        options = RefitOptions(policy="wait", mode="in_place", deadlines=SHORT.deadlines)
        report = await asyncio.wait_for(_report(engine.refit_to(1, options, script=script)), 1.5)
        assert report.error is not None
        assert (report.error.slug, report.error.fields["peer"]) == ("deadline_exceeded", "trainer")
        assert (await engine.generate([9], FIVE)).spans == ((0, 0, 5),)
        for stream in streams:
            stream.cancel()


async def test_workers_that_cannot_undo_are_torn_though_they_say_that_nothing_was_touched() -> None:
    async with ringed(2) as engine:
        sim, call = engine.sims[0], engine.sims[0].call_workers

        async def answer(op: WorkerOp) -> Sequence[WorkerReply]:
            return await call(op) if op.verb != "undo" else [WorkerReply(0, error=RemoteError("no").record())]

        sim.call_workers = answer  # type: ignore[method-assign]
        sim.script.plan("load", "raise")
        assert (await within(engine.refit_to(1, SHORT))).outcome is Outcome.PARTIAL
        assert engine.phase() is Phase.QUARANTINED


@pytest.mark.parametrize("fault", ["raise", "hang"])
async def test_a_staged_refit_waits_for_its_receivers_and_for_none_too_long(fault: Fault) -> None:
    async with ringed(2) as engine:
        engine.transport.script.plan("attach", fault)
        report = await within(engine.refit_to(1, RefitOptions(mode="staged", deadlines=SHORT.deadlines)))
        (lost,) = (part for part in report.replicas.values() if not part.committed)
        assert lost.error is not None
        assert lost.error.fields.get("peer") == ("receivers" if fault == "hang" else None)
        assert lost.seconds["stage"] < 0.25
        assert report.outcome is Outcome.PARTIAL
        assert {engine.phase(n) for n in range(2)} == {Phase.SERVING}


async def test_nothing_supersedes_a_refit_for_which_a_replica_suspends() -> None:
    async with ringed(2, delays=Delays(call=0.02)) as engine:
        script = Script()
        script.plan("fill", None, "hang")
        first = engine.refit_to(1, SHORT, script=script)
        await engine.replicas[0].reached(frozenset({Phase.SUSPENDING}))
        second = engine.refit_to(2, IN_PLACE)
        with pytest.raises(PitstopError):
            await first
        assert {engine.phase(0), engine.phase(1)} <= {Phase.QUARANTINED, Phase.RECEIVING}
        assert (await second).outcome is Outcome.COMMITTED


@pytest.mark.parametrize("phase", [Phase.SUSPENDING, Phase.RECEIVING, Phase.FINALIZING])
async def test_closing_ends_everything_wherever_the_refit_is(phase: Phase) -> None:
    before = asyncio.all_tasks()
    engine = ringed(2, delays=Delays(step=0.001, call=0.01))
    async with engine:
        stream = asyncio.create_task(engine.generate([1], LONG))
        await asyncio.sleep(0.03)
        handle = engine.refit_to(1, IN_PLACE)
        await engine.replicas[0].reached(frozenset({phase}))
    with pytest.raises(EngineClosed):
        await stream
    with pytest.raises(EngineClosed):
        await handle
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_replica_that_dies_before_its_part_begins_is_named_and_has_no_time_in_a_stage() -> None:
    async with ringed(2) as engine:
        plan = engine.transport.plan

        async def plan_and_die(*args: object) -> object:
            engine.sims[0].die()
            await engine.replicas[0].reached(frozenset({Phase.DEAD}))
            return await plan(*args)  # type: ignore[arg-type]

        for version, mode in enumerate(("staged", "in_place"), 1):
            engine.transport.plan = plan_and_die  # type: ignore[assignment,method-assign]
            report = await within(engine.refit_to(version, RefitOptions(mode=mode)))  # type: ignore[arg-type]
            assert report.outcome is Outcome.PARTIAL
            assert report.replicas["replica-0"].seconds == {}
            engine.transport.plan = plan  # type: ignore[method-assign]
            await engine.restart()
            assert (await engine.refit_to(version, IN_PLACE)).outcome is Outcome.COMMITTED


async def _report(handle: RefitHandle) -> RefitReport:
    with contextlib.suppress(PitstopError):
        await handle
    assert handle.report is not None
    return handle.report


async def within(handle: RefitHandle) -> RefitReport:
    return await asyncio.wait_for(_report(handle), 5)


async def repaired(engine: SimFleet) -> None:
    """The next refit works in the same process, however it is received."""
    for sim in engine.sims:
        sim.script.faults.clear()
    engine.transport.script.faults.clear()
    await engine.restart()
    for version, mode in ((7, "in_place"), (8, "staged"), (9, "in_place")):
        report = await within(engine.refit_to(version, RefitOptions(mode=mode)))  # type: ignore[arg-type]
        assert report.outcome is Outcome.COMMITTED
        made = await asyncio.gather(*(engine.generate([n], FIVE) for n in range(4)))
        assert {each.spans for each in made} == {((version, 0, 5),)}
        assert TORN not in {token for each in made for token in each.token_ids}
