"""Telemetry under the real drivers, on simulated engines: what they say is understood, and what they do shows."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import StatusCode

from pitstop.engine.errors import RemoteError
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import Outcome
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import Delays, SimulatedBackend
from pitstop.telemetry import names
from pitstop.telemetry.live import Live
from pitstop.telemetry.metrics import Instruments
from pitstop.telemetry.tee import Tee
from tests.engine.sim import SimFleet
from tests.telemetry.builders import Recorder, attributes, context, parent_id

PHASES = [names.SUSPEND, names.RECEIVE_WEIGHTS, names.FINALIZE, names.RESUME]


async def test_a_restart_is_a_life_of_its_own_from_its_first_transition_on() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    async with SimFleet([SimulatedBackend()], observer) as fleet:
        fleet.sims[0].die()
        await fleet.replicas[0].reached(frozenset({Phase.DEAD}))
        await fleet.restart()
        await fleet.refit_to(1)
    observer.cut()
    assert dict(recorder.dropped) == {}
    boots = [
        (attributes(span)["rl.replica.incarnation"], span.status.status_code) for span in recorder.named(names.BOOT)
    ]
    assert boots == [(1, StatusCode.UNSET), (2, StatusCode.UNSET)]


async def test_refits_under_load_tile_and_nothing_that_is_said_is_lost() -> None:
    recorder, reader, live = Recorder(), InMemoryMetricReader(), Live()
    instruments = Instruments(MeterProvider([reader], shutdown_on_exit=False).get_meter("test"))
    observer = recorder.observer(level=2, sample=0.0)
    engines = [SimulatedBackend(delays=Delays(step=0.001)) for _ in range(2)]
    async with SimFleet(engines, Tee(observer, instruments, live, dropped=recorder.drop)) as fleet:
        requests = [asyncio.create_task(fleet.generate([n], SamplingParams(max_tokens=100))) for n in range(8)]
        await asyncio.sleep(0.02)
        assert (await fleet.refit_to(1)).outcome is Outcome.COMMITTED
        await asyncio.gather(*requests)
        assert (await fleet.refit_to(2)).outcome is Outcome.COMMITTED
    observer.cut()

    assert dict(recorder.dropped) == {}
    assert len(recorder.begun) == len(recorder.ended)
    refits, parts = recorder.named(names.REFIT), recorder.named(names.REFIT_REPLICA)
    assert (len(refits), len(parts)) == (2, 4)
    for part in parts:
        assert parent_id(part) in {context(refit).span_id for refit in refits}
        children = [span for span in recorder.ended if parent_id(span) == context(part).span_id]
        assert [span.name for span in children] == PHASES
        borders = [part.start_time, *(span.end_time for span in children)]
        assert [span.start_time for span in children] == borders[:-1]
        assert borders[-1] == part.end_time
        assert attributes(part)["rl.refit.outcome"] == "committed"
    held = recorder.named(names.GENERATE)
    assert len(held) == 8
    assert {(attributes(span)["rl.weight_version.first"], attributes(span)["rl.weight_version.last"])
            for span in held} == {(0, 1)}  # fmt: skip
    assert (live.active, dict(live.finished), dict(live.refits)) == (0, {"length": 8}, {"committed": 2})
    instruments.fold()
    data = reader.get_metrics_data()
    assert data is not None
    told = {metric.name for metric in data.resource_metrics[0].scope_metrics[0].metrics if metric.data.data_points}
    assert {names.REFIT_DURATION, names.PHASE_DURATION, names.REQUESTS, names.INFERENCE_FIRST_CHUNK} <= told
    assert names.DROPPED not in told


async def test_a_torn_refit_shows_where_it_tore() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    engine = SimulatedBackend()
    async with SimFleet([engine], Tee(observer, dropped=recorder.drop)) as fleet:
        engine.script.plan("apply", "raise")
        with pytest.raises(RemoteError, match="scripted"):
            await fleet.refit_to(1)
        assert fleet.replicas[0].phase is Phase.QUARANTINED
    observer.cut()
    part = recorder.one(names.REFIT_REPLICA)
    assert part.status.status_code is StatusCode.ERROR
    assert attributes(part)["rl.refit.outcome"] == "torn"
    assert len(recorder.named(names.QUARANTINE)) == 1
    children = [span for span in recorder.ended if parent_id(span) == context(part).span_id]
    failed = [span for span in children if span.status.status_code is StatusCode.ERROR]
    assert [span.name for span in failed] == [names.RECEIVE_WEIGHTS]
    assert attributes(failed[0])["error.type"] == attributes(part)["error.type"]
