from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint

from pitstop.engine.ports import Work
from pitstop.telemetry import names
from pitstop.telemetry.metrics import Instruments
from tests.telemetry.builders import P, change, generate, refit_work, whole_refit

SECOND = 1_000_000_000


class Meter:
    """Instruments and what a reader sees of them."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.instruments = Instruments(self.provider.get_meter("test"))

    def read(self) -> dict[str, dict[tuple[object, ...], Any]]:
        """Values by metric and attribute values: sums, or (count, sum, bucket counts)."""
        data = self.reader.get_metrics_data()
        found: dict[str, dict[tuple[object, ...], Any]] = {}
        for scoped in data.resource_metrics[0].scope_metrics if data else ():
            for metric in scoped.metrics:
                points = found.setdefault(metric.name, {})
                for point in metric.data.data_points:
                    key = labels(metric.name, point.attributes or {})
                    if isinstance(point, NumberDataPoint):
                        points[key] = point.value
                    else:
                        points[key] = (point.count, point.sum)
        return found


def labels(metric: str, found: Mapping[str, object]) -> tuple[object, ...]:
    allowed = names.METRICS[metric].attributes
    assert set(found) <= set(allowed), metric
    return tuple(found.get(name) for name in allowed)


def test_a_refit_in_numbers() -> None:
    meter = Meter()
    told = meter.instruments
    told.transition(change(P.DEAD, "RestartAsked", P.STARTING, 0))
    told.transition(change(P.STARTING, "BootedWith", P.SERVING, SECOND))
    told.opened(refit_work("r", SECOND, transport="nccl"))
    for each in whole_refit("r", 2 * SECOND, SECOND // 4, bytes=640):
        told.transition(each)
    told.counted(names.BUBBLE, 0.5, {"transport": "nccl", "replica": "a"})
    told.closed("refit:r", 4 * SECOND, detail={"outcome": "committed"})
    found = meter.read()
    assert found[names.REFIT_DURATION] == {("nccl", "committed", None): (1, 3.0)}
    assert found[names.PHASE_DURATION] == {
        (phase, "nccl", None): (1, 0.25) for phase in ("suspend", "receive", "finalize", "resume")
    }
    assert found[names.TRANSFER_BYTES] == {("nccl", "received"): 640}
    assert found[names.BUBBLE] == {("nccl",): (1, 0.5)}
    status = {state: value for (state,), value in found[names.STATUS].items() if value}
    assert status == {"serving": 1}
    assert found[names.TRANSITIONS]["serving", "suspending"] == 1
    assert sum(found[names.TRANSITIONS].values()) == 7


def test_staged_bytes_are_counted_once_and_sent_bytes_apart() -> None:
    meter = Meter()
    told = meter.instruments
    told.opened(refit_work("r", 0, transport="shared_memory"))
    told.opened(Work("stage", "stage:r:a", 0, "refit:r"))
    told.closed("stage:r:a", SECOND, detail={"bytes": 640})
    for each in whole_refit("r", SECOND, bytes=640):
        told.transition(each)
    for refit, error in (("r", None), ("s", "peer_lost")):
        told.opened(Work("send_weights", f"send_weights:{refit}", 0, detail={"bytes": 320, "transport": "nccl"}))
        told.closed(f"send_weights:{refit}", SECOND, error)
    found = meter.read()
    assert found[names.TRANSFER_BYTES] == {("shared_memory", "received"): 640, ("nccl", "sent"): 320}
    assert found[names.PHASE_DURATION]["stage", "shared_memory", None] == (1, 1.0)


def test_a_failure_carries_the_same_error_type_as_its_span() -> None:
    meter = Meter()
    told = meter.instruments
    told.opened(refit_work("r", 0))
    told.transition(whole_refit("r", 0)[0])
    told.transition(change(P.SUSPENDING, "Died", P.DEAD, SECOND, refit="r", error="replica_died"))
    told.closed("refit:r", SECOND, "replica_died", {"outcome": "failed"})
    found = meter.read()
    assert found[names.PHASE_DURATION] == {("suspend", None, "replica_died"): (1, 1.0)}
    assert found[names.REFIT_DURATION] == {(None, "failed", "replica_died"): (1, 1.0)}


def test_requests_in_numbers() -> None:
    meter = Meter()
    told = meter.instruments
    for n in range(3):
        told.opened(generate(str(n), 0, model="m", prompt_tokens=7))
    told.closed(
        "generate:0", 3 * SECOND, None, {"finish_reason": "length", "output_tokens": 5, "first_token_at": SECOND}
    )
    told.closed("generate:1", SECOND, "replica_died", {"finish_reason": "error", "output_tokens": 0})
    told.closed("generate:1", SECOND)
    found = meter.read()
    model = (None, None, "m")
    assert found[names.REQUESTS] == {("length", None): 1, ("error", "replica_died"): 1}
    assert found[names.REQUESTS_ACTIVE] == {(): 1}
    assert found[names.INFERENCE_DURATION] == {(*model, None): (1, 3.0), (*model, "replica_died"): (1, 1.0)}
    assert found[names.INFERENCE_FIRST_CHUNK] == {model: (1, 1.0)}
    assert found[names.INFERENCE_PER_CHUNK] == {model: (1, 0.5)}
    assert found[names.INFERENCE_INPUT] == {model: 14}
    assert found[names.INFERENCE_OUTPUT] == {model: 5}


def test_only_declared_names_and_labels_get_in() -> None:
    meter = Meter()
    told = meter.instruments
    told.counted("rl.made.up", 1)
    told.counted(names.STALENESS, float("nan"))
    told.counted(names.STALENESS, 2, {"at": "admission", "request_id": "one of millions"})
    told.counted(names.ILLEGAL_EVENTS, 1, {"state": "serving", "event": "Resumed"})
    found = meter.read()
    assert found[names.STALENESS] == {("admission",): (1, 2)}
    assert found[names.ILLEGAL_EVENTS] == {("serving", "Resumed"): 1}
    assert found[names.DROPPED] == {("metric", "unknown_name"): 1, ("metric", "not_a_number"): 1}


def test_buckets_and_units_are_the_declared_ones() -> None:
    meter = Meter()
    meter.instruments.counted(names.STALENESS, 5)
    meter.instruments.fold()
    data = meter.reader.get_metrics_data()
    assert data is not None
    metric = next(m for m in data.resource_metrics[0].scope_metrics[0].metrics if m.name == names.STALENESS)
    point = metric.data.data_points[0]
    assert isinstance(point, HistogramDataPoint)
    assert metric.unit == "{version}"
    assert tuple(point.explicit_bounds) == names.METRICS[names.STALENESS].buckets


def test_numbers_from_many_threads_add_up() -> None:
    meter = Meter()

    def work() -> None:
        for n in range(500):
            key = f"{threading.get_ident()}-{n}"
            meter.instruments.opened(generate(key, 0))
            meter.instruments.closed(f"generate:{key}", 1, None, {"finish_reason": "stop"})
            if n % 50 == 0:
                meter.instruments.fold()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meter.instruments.fold()
    found = meter.read()
    assert found[names.REQUESTS] == {("stop", None): 2000}
    assert found[names.REQUESTS_ACTIVE] == {(): 0}


def test_what_is_pending_is_bounded_and_the_loss_is_counted() -> None:
    meter = Meter()
    for _ in range(200_010):
        meter.instruments.counted(names.STALENESS, 1)
    meter.instruments.fold()
    found = meter.read()
    assert found[names.DROPPED] == {("metric", "too_many_pending"): 10}


def test_a_muted_instrument_records_nothing() -> None:
    meter = Meter()
    meter.instruments.mute()
    meter.instruments.counted(names.STALENESS, 1)
    assert meter.instruments.fold() is False
