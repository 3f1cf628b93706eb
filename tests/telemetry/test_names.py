"""Names are declared and emitted: neither without the other."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pitstop.engine.ports import Work
from pitstop.telemetry import names
from pitstop.telemetry.metrics import Instruments
from pitstop.telemetry.observer import SPAN_OF
from pitstop.telemetry.tee import Tee
from tests.telemetry.builders import P, Recorder, change, generate, refit_work, whole_refit

SECOND = 1_000_000_000
DETAILS = dict.fromkeys(names.DETAILS, 1)
RESOURCE = {names.SERVICE_NAME, names.SERVICE_INSTANCE_ID, names.RUN_ID, names.ROLE}


def everything(told: Tee) -> None:
    """A life in which each thing happens once."""
    told.transition(change(P.DEAD, "RestartAsked", P.STARTING, 0))
    told.transition(change(P.STARTING, "BootedEmpty", P.IDLE, 1))
    told.transition(change(P.IDLE, "SleepAsked", P.SLEEPING, 2, level=2))
    told.transition(change(P.SLEEPING, "WokenEmpty", P.IDLE, 3))
    told.opened(refit_work("r", 4, **DETAILS | {"transport": "memory"}))
    told.opened(Work("send_weights", "send_weights:r", 4))
    told.opened(Work("stage", "stage:r:a", 5, "refit:r"))
    told.closed("stage:r:a", 6, "peer_lost")
    told.transition(change(P.SERVING, "RefitOffered", P.SUSPENDING, 9, replica="b", refit="r"))
    for each in whole_refit("r", 10, live=1, released=1, bytes=1, tensors=1, cache="kept", policy="keep"):
        told.transition(each)
    told.transition(change(P.SERVING, "RefitOffered", P.SUSPENDING, 70, refit="r2"))
    told.transition(change(P.SUSPENDING, "Suspended", P.RECEIVING, 71, refit="r2"))
    told.transition(change(P.RECEIVING, "FailedTorn", P.QUARANTINED, 72, refit="r2", error="peer_lost"))
    told.transition(change(P.QUARANTINED, "StopAsked", P.STOPPED, 73))
    told.closed("send_weights:r", 74, detail={"bytes": 1})
    told.closed("refit:r", 75, "refit_failed", {"outcome": "failed"})
    told.opened(generate("q", 80, operation="chat", provider="vllm", model="m", prompt_tokens=1))
    told.closed(
        "generate:q", 90 * SECOND, "x", {"finish_reason": "error", "output_tokens": 2, "first_token_at": SECOND}
    )
    told.counted(names.BUBBLE, 1, {"transport": "memory"})
    told.counted(names.STALENESS, 1, {"at": "admission"})
    told.counted(names.ILLEGAL_EVENTS, 1, {"state": "serving", "event": "Resumed"})
    told.counted(names.RECOVERIES, 1, {"recovery": "recovered"})
    told.counted(names.DRAFTER_ACCEPTANCE, 0.5)
    told.counted(names.DRAFTER_DROPS, 1)
    told.counted("rl.unheard.of", 1)


def test_what_is_declared_is_emitted_and_nothing_else() -> None:
    recorder, reader = Recorder(), InMemoryMetricReader()
    instruments = Instruments(MeterProvider([reader], shutdown_on_exit=False).get_meter("test"))
    observer = recorder.observer(level=2, sample=1.0)
    everything(Tee(observer, instruments))
    observer.cut(90)
    assert {span.name for span in recorder.ended} == set(names.SPANS)
    written = {key for span in recorder.ended for key in span.attributes or {}}
    written |= {key for span in recorder.ended for link in span.links for key in link.attributes or {}}
    instruments.fold()
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    assert {metric.name for metric in metrics} == set(names.METRICS)
    for metric in metrics:
        labels = {key for point in metric.data.data_points for key in point.attributes or {}}
        assert labels == set(names.METRICS[metric.name].attributes), metric.name
        assert metric.unit == names.METRICS[metric.name].unit
        written |= labels
    assert written | RESOURCE == names.ATTRIBUTES


def test_every_phase_but_the_last_two_has_a_span() -> None:
    assert set(P) - set(SPAN_OF) == {P.DEAD, P.STOPPED}
    assert set(SPAN_OF.values()) <= set(names.SPANS)


def test_own_names_are_in_one_namespace_and_well_formed() -> None:
    for name in (*names.SPANS, *names.METRICS, *names.ATTRIBUTES):
        assert name.startswith(("rl.", "gen_ai.", "service.")) or name == "error.type"
        assert all(part.replace("_", "").isalnum() and part == part.lower() for part in name.split("."))
    for metric in names.METRICS.values():
        assert metric.buckets == tuple(sorted(set(metric.buckets)))
        assert bool(metric.buckets) == (metric.kind == "histogram")
