"""Scripted peers around any backend, transport and trainer: one errs, the other commits, and the next refit works."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitstop.engine.errors import PitstopError
from pitstop.engine.faultkit import FAULTS, Fault, FaultyBackend, FaultySending, FaultyTransport, Script
from pitstop.engine.fleet import Fleet
from pitstop.engine.handle import RefitHandle
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import Deadlines, Outcome, RefitOptions, RefitReport
from pitstop.engine.replica import SETTLED
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import TORN, Delays, SimulatedBackend, SimulatedSending, SimulatedTransport
from pitstop.engine.worker_ports import Offer
from tests.engine.sim import Log, expected

QUICK = Deadlines(
    suspend=0.1, drain=0.3, receive=0.3, receive_per_gib=0, finalize=0.2, resume=0.2, control=0.2, silence=0.2
)  # fmt: skip
LONG = SamplingParams(max_tokens=3000)


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """An engine whose pause never settles is given up sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pitstop.engine.actions._SETTLE", 0.1)
        yield


class Fleeted(Fleet):
    """Two replicas, the first of which is scripted, as are the transport's words about it, and the trainer."""

    def __init__(self) -> None:
        self.script = Script()
        self.sims = [SimulatedBackend(delays=Delays(step=0.001)) for _ in range(2)]
        transport = SimulatedTransport()
        for sim in self.sims:
            sim.transport = transport
        self.first = FaultyBackend(self.sims[0], self.script)
        self.log = Log()
        self.faulty = FaultyTransport(transport, self.script, "replica-0")
        super().__init__([self.first, self.sims[1]], self.faulty, self.log)

    async def refitted(self, version: int) -> RefitReport:
        offer = Offer(uuid.uuid4().hex, version, self.sims[0].specs)
        sending = FaultySending(SimulatedSending(offer), self.script)

        async def make() -> FaultySending:
            return sending

        handle = self.offer(make, RefitOptions(deadlines=QUICK), RefitHandle(offer.refit_id, version))
        async with asyncio.timeout(10):
            with contextlib.suppress(PitstopError):
                await handle
        assert handle.report is not None
        return handle.report

    async def healed(self, version: int) -> None:
        """Forget the script; everybody takes a version and serves it."""
        self.script.faults.clear()
        self.first.revive()
        self.faulty.revive()
        async with asyncio.timeout(20):
            for replica in self.replicas:
                await replica.reached(SETTLED)
            await self.restart()
            report = await self.refitted(version)
        assert report.outcome is Outcome.COMMITTED, report
        assert [replica.weight_version for replica in self.replicas] == [version] * 2
        done = await asyncio.gather(*(self.generate([n], SamplingParams(max_tokens=3)) for n in range(4)))
        assert {completion.spans for completion in done} == {((version, 0, 3),)}


class Viewer:
    def __init__(self, engine: Fleeted, prompt: int) -> None:
        self.tokens: list[int] = []
        self.spans: list[tuple[int, int, int]] = []
        self.prompt = [prompt]
        self.stream = engine.stream(self.prompt, LONG)
        self.task = asyncio.create_task(self.read())

    async def read(self) -> None:
        with contextlib.suppress(PitstopError):
            async for chunk in self.stream:
                self.spans.append((chunk.weight_version, chunk.start, chunk.start + len(chunk.token_ids)))
                self.tokens += chunk.token_ids

    async def leave(self, *, truly: bool) -> None:
        await self.stream.aclose()
        async with asyncio.timeout(5):
            await self.task
        assert TORN not in self.tokens
        if truly:
            assert self.tokens == expected(self.prompt, self.spans)


S, Q, D = Phase.SERVING, Phase.QUARANTINED, Phase.DEAD
ENDS: dict[str, dict[Fault, Phase]] = {
    "receive": {"raise": S, "tear": S, "hang": S, "freeze": S, "die": D},
    "suspend": {"raise": S, "tear": S, "hang": D, "freeze": D, "forget": D, "die": D},
    "apply": {"raise": S, "tear": Q, "hang": Q, "freeze": Q, "forget": Q, "die": D},
    "finalize": {"raise": Q, "tear": Q, "hang": Q, "freeze": Q, "forget": Q, "die": D},
    "reset_cache": {"raise": Q, "tear": Q, "hang": Q, "freeze": Q, "forget": Q, "die": D},
    "label": {"raise": Q, "hang": Q, "die": D},
    "resume": {"raise": Q, "tear": Q, "hang": Q, "freeze": Q, "forget": Q, "die": D},
    "attached": {},
    "landed": {"hang": S, "forget": S},
}
"""Of each fault of one replica's peers: where it leaves that replica. The other one commits."""


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, ends in ENDS.items() for fault in ends])
async def test_a_fault_of_one_replica_is_a_typed_error_of_that_replica_only(name: str, fault: Fault) -> None:
    async with Fleeted() as engine:
        viewers = [Viewer(engine, n) for n in range(2)]
        await asyncio.sleep(0.01)
        engine.script.plan(name, fault)
        report = await engine.refitted(1)
        assert engine.script.struck == [(name, fault)]
        error = report.replicas["replica-0"].error
        if name == "landed" and fault == "hang":
            # What one receiver's last word blocks may be the other's.
            assert report.outcome in (Outcome.PARTIAL, Outcome.FAILED)
        else:
            assert report.outcome is Outcome.PARTIAL
            assert report.replicas["replica-1"].committed
        assert error is not None
        assert "scripted" in error.message or error.slug == "deadline_exceeded"
        phase = ENDS[name][fault]
        if phase is not D:
            assert engine.replicas[0].phase is phase
        else:
            await asyncio.wait_for(engine.replicas[0].reached(frozenset({D})), 2)
        await engine.healed(2)
        for viewer in viewers:
            await viewer.leave(truly=True)


@pytest.mark.parametrize(
    ("name", "fault", "slug"),
    [
        ("send", "raise", "remote_error"),
        ("send", "tear", "remote_error"),
        ("send", "hang", "deadline_exceeded"),
        ("send", "freeze", "deadline_exceeded"),
        ("send", "forget", "deadline_exceeded"),
        ("send", "die", "peer_lost"),
        ("send", "lie", "protocol_violation"),
        ("offer", "lie", "stale_version"),
        ("plan", "raise", "remote_error"),
        ("plan", "hang", "deadline_exceeded"),
        ("plan", "lie", "deadline_exceeded"),
        ("seal", "raise", "remote_error"),
        ("seal", "hang", "deadline_exceeded"),
        ("seal", "freeze", None),
        ("landed", "raise", None),
        ("landed", "lie", None),
    ],
)
async def test_a_fault_of_the_trainer_or_the_transport_costs_a_version_and_nothing_else(
    name: str, fault: Fault, slug: str | None
) -> None:
    async with Fleeted() as engine:
        await engine.refitted(1)
        viewers = [Viewer(engine, n) for n in range(2)]
        await asyncio.sleep(0.01)
        engine.script.plan(name, fault)
        report = await engine.refitted(2)
        assert engine.script.struck == [(name, fault)]
        errors: list[PitstopError | None] = [part.error for part in report.replicas.values() if part.error]
        errors = errors or [report.error]
        if slug is None:
            assert errors in ([None], []) or report.outcome is not Outcome.FAILED
        else:
            assert report.outcome is Outcome.FAILED
            assert {error.slug for error in errors if error is not None} == {slug}
            assert [replica.phase for replica in engine.replicas] == [S, S]
            assert [replica.weight_version for replica in engine.replicas] == [1, 1]
        await engine.healed(3)
        for viewer in viewers:
            await viewer.leave(truly=True)


@pytest.mark.parametrize("name", ["abort", "release", "settled", "replay"])
@pytest.mark.parametrize("fault", ["raise", "hang", "forget", "die"])
async def test_a_fault_in_what_comes_after_a_refit_does_not_change_how_it_ended(name: str, fault: Fault) -> None:
    async with Fleeted() as engine:
        engine.script.plan(name, fault)
        if name == "abort":
            engine.script.plan("send", "raise")
        report = await engine.refitted(1)
        assert report.outcome is (Outcome.FAILED if name == "abort" else Outcome.COMMITTED)
        await engine.healed(2)


async def test_an_engine_that_says_landed_before_it_has_changes_nothing() -> None:
    async with Fleeted() as engine:
        engine.script.plan("attached", "lie")
        engine.script.plan("send", "hang")
        report = await engine.refitted(1)
        assert engine.script.struck[0] in (("attached", "lie"), ("send", "hang"))
        assert report.replicas["replica-0"].error is not None
        assert engine.replicas[0].weight_version == 0
        await engine.healed(2)


@pytest.mark.parametrize("name", ["suspend", "reset_cache", "receive", "apply", "finalize", "release"])
async def test_what_a_lying_backend_says_ends_neither_the_fleet_nor_a_stream(name: str) -> None:
    async with Fleeted() as engine:
        viewers = [Viewer(engine, n) for n in range(2)]
        await asyncio.sleep(0.01)
        engine.script.plan(name, "lie")
        report = await engine.refitted(1)
        assert engine.script.struck == [(name, "lie")]
        assert report.replicas["replica-1"].committed
        await engine.healed(2)
        await viewers[1].leave(truly=False)
        await viewers[0].leave(truly=False)


async def test_a_backend_that_forgets_everything_is_mute_and_one_that_is_dead_says_so() -> None:
    script = Script()
    backend = FaultyBackend(SimulatedBackend(), script)
    await backend.start("r", 1)
    dying = asyncio.ensure_future(backend.died())
    script.plan("resume", "forget")
    for call in (backend.resume, backend.reset_cache, lambda: backend.suspend("keep")):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call(), 0.02)
    assert not dying.done()
    dying.cancel()
    await backend.start("r", 2)
    script.plan("label", "die")
    with pytest.raises(PitstopError, match="scripted"):
        await backend.label(1)
    assert (await backend.died()).slug == "replica_died"
    with pytest.raises(PitstopError, match="scripted"):
        await backend.suspend("keep")
    await backend.close()


NAMES = [
    "submit",
    "suspend",
    "resume",
    "reset_cache",
    "receive",
    "apply",
    "finalize",
    "undo",
    "release",
    "label",
    "next",
]
TROUBLE = [*NAMES, "plan", "seal", "landed", "abort", "send", "settled"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from(TROUBLE), st.sampled_from([f for f in FAULTS if f != "lie"])), min_size=1, max_size=4
    )
)
def test_whatever_the_script_says_everything_ends_and_the_next_refit_works(plot: list[tuple[str, Fault]]) -> None:
    async def play() -> None:
        async with Fleeted() as engine:
            viewers = [Viewer(engine, n) for n in range(2)]
            await asyncio.sleep(0.005)
            for name, fault in plot:
                engine.script.plan(name, fault)
            report = await engine.refitted(1)
            assert report.outcome is not Outcome.SUPERSEDED
            for part in report.replicas.values():
                assert part.committed is (part.error is None)
            await engine.healed(2)
            for viewer in viewers:
                await viewer.leave(truly=True)

    asyncio.run(play())
