"""Whatever happens to a fleet, in any order: no torn token, no stream that ends twice, none that is lost."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitstop.engine.errors import PitstopError
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import POLICIES, Deadlines, Outcome, RefitOptions
from pitstop.engine.replica import SETTLED
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import TORN, Script, SimulatedBackend
from pitstop.engine.worker_ports import MODES
from tests.engine.sim import SimFleet, expected

QUICK = Deadlines(
    suspend=0.05, drain=0.2, receive=0.1, receive_per_gib=0, finalize=0.1, resume=0.1, control=0.1, silence=0.1
)
CALLS = [
    "submit",
    "suspend",
    "receive",
    "load",
    "apply",
    "finalize",
    "undo",
    "release",
    "reset_cache",
    "resume",
    "sleep",
    "wake",
]

step = st.one_of(
    st.tuples(st.just("request"), st.integers(0, 60), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 9), st.none()),
    st.tuples(
        st.just("refit"),
        st.tuples(st.sampled_from(POLICIES), st.sampled_from(MODES)),
        st.tuples(st.sampled_from(["send", "fill"]), st.integers(0, 2), st.sampled_from([None, "raise", "hang"])),
    ),
    st.tuples(
        st.just("fault"), st.tuples(st.integers(0, 1), st.sampled_from(CALLS)), st.sampled_from(["raise", "die"])
    ),
    st.tuples(
        st.just("load"), st.tuples(st.integers(0, 1), st.integers(0, 2)), st.sampled_from(["raise", "hang", "lie"])
    ),
    st.tuples(st.sampled_from(["attach", "land"]), st.sampled_from(["raise", "hang"]), st.none()),
    st.tuples(st.just("die"), st.integers(0, 1), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
    st.tuples(st.just("sleep"), st.sampled_from([1, 2]), st.sampled_from(["recompute", "abort"])),
    st.tuples(st.just("wake"), st.none(), st.none()),
    st.tuples(st.just("ticks"), st.integers(1, 30), st.none()),
)


class _Watched(SimulatedBackend):
    """Notes every token made, and any made while nothing is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, list[int]] = {}
        self.fleet: SimFleet | None = None
        self.offences: list[str] = []

    def _step(self) -> None:
        replica = self.fleet.replicas[self.fleet.sims.index(self)] if self.fleet else None
        if replica is not None and self.legs:
            live = set(self.live.values())
            if replica.weight_version is None or live != {replica.weight_version}:
                self.offences.append(f"{replica.name} {replica.phase} {live} {replica.weight_version}")
        legs = list(self.legs.values())
        super()._step()
        for leg in legs:
            if leg._ready:
                self.made.setdefault(leg.request.request_id, []).append(leg._ready[-1])


async def _stream(engine: SimFleet, n: int, budget: int, ends: list[str]) -> None:
    """One consumer: checks its own tokens as they come."""
    stream = engine.stream([n], SamplingParams(max_tokens=budget))
    got: list[int] = []
    spans: list[tuple[int, int, int]] = []
    finished = 0
    try:
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                assert chunk.start == len(got)
                got += chunk.token_ids
                spans.append((chunk.weight_version, chunk.start, len(got)))
                finished += chunk.finish_reason is not None
    except PitstopError:
        ends.append("error")
    else:
        ends.append(str(stream.finish_reason))
        assert finished == (1 if budget else 0)
    assert TORN not in got
    assert got == expected([n], spans)
    made = [t for sim in engine.sims if isinstance(sim, _Watched) for t in sim.made.get(stream.request_id, [])]
    assert got == made


async def _run(slots: int, steps: list[tuple[str, object, object]]) -> None:
    sims = [_Watched(), _Watched()]
    async with SimFleet(sims) as engine:
        engine.transport.slots = slots
        for sim in sims:
            sim.fleet = engine
        tasks: list[asyncio.Task[None]] = []
        others: list[asyncio.Task[object]] = []
        ends: list[str] = []
        cancelled = 0
        version = 0
        for kind, a, b in steps:
            if kind == "request":
                assert isinstance(a, int)
                tasks.append(asyncio.create_task(_stream(engine, len(tasks) + 1, a, ends)))
            elif kind == "cancel" and tasks:
                assert isinstance(a, int)
                cancelled += tasks[a % len(tasks)].cancel()
            elif kind == "refit":
                version += 1
                script = Script()
                (policy, mode), (call, n, fault) = a, b  # type: ignore[misc]
                script.plan(call, *[None] * n, fault)  # type: ignore[has-type]
                options = RefitOptions(policy=policy, mode=mode, deadlines=QUICK)  # type: ignore[has-type]
                handle = engine.refit_to(version, options, script=script)
                others.append(asyncio.ensure_future(_swallow(handle)))
            elif kind == "fault":
                index, call = a  # type: ignore[misc]
                sims[index].script.plan(call, b)  # type: ignore[arg-type, has-type]
            elif kind == "load":
                index, n = a  # type: ignore[misc]
                sims[index].script.plan("load", *[None] * n, b)  # type: ignore[arg-type, has-type]
            elif kind in ("attach", "land"):
                engine.transport.script.plan(kind, a)  # type: ignore[arg-type]
            elif kind == "die":
                sims[a].die()  # type: ignore[call-overload]
            elif kind == "restart":
                others.append(asyncio.ensure_future(_swallow(engine.restart())))
            elif kind == "sleep":
                others.append(asyncio.ensure_future(_swallow(engine.sleep(a, policy=b))))  # type: ignore[arg-type]
            elif kind == "wake":
                others.append(asyncio.ensure_future(_swallow(engine.wake_up())))
            elif kind == "ticks":
                assert isinstance(a, int)
                for _ in range(a):
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*others), 30)
        if any(r.phase is Phase.SLEEPING for r in engine.replicas):
            await _swallow(engine.wake_up())
        # Held requests wait for as long as a refit may come: after the last one, closing ends them.
        await asyncio.sleep(0)
        assert all(r.phase in SETTLED for r in engine.replicas)
        await _works(engine, version + 1)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    assert len(ends) == sum(not isinstance(r, asyncio.CancelledError) for r in results)
    assert not [o for sim in sims for o in sim.offences]
    assert not any(sim.legs for sim in sims)


async def _works(engine: SimFleet, version: int) -> None:
    """Whatever was left behind, the next refit brings every replica back, in place."""
    for script in (engine.transport.script, *(sim.script for sim in engine.sims)):
        script.faults.clear()
    await engine.restart()
    report = await engine.refit_to(version, RefitOptions(policy="abort", mode="in_place"))
    assert report.outcome is Outcome.COMMITTED
    assert {replica.weight_version for replica in engine.replicas} == {version}
    assert {replica.phase for replica in engine.replicas} == {Phase.SERVING}


async def _swallow(call: object) -> None:
    with contextlib.suppress(PitstopError):
        await call  # type: ignore[misc]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([0, 2]), st.lists(step, min_size=3, max_size=40))
def test_no_sequence_of_events_faults_and_cancellations_breaks_a_guarantee(
    slots: int, steps: list[tuple[str, object, object]]
) -> None:
    asyncio.run(_run(slots, steps))
