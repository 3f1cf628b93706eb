from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from pitstop.engine.ports import Work
from pitstop.telemetry import context as w3c
from pitstop.telemetry import names
from tests.telemetry.builders import (
    P,
    Recorder,
    attributes,
    change,
    context,
    generate,
    parent_id,
    refit_work,
    whole_refit,
)

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def test_a_refit_is_one_trace_with_the_trainer_above_and_linked() -> None:
    trainer, fleet = Recorder(), Recorder()
    headers = trainer.observer().opened(Work("send_weights", "send_weights:r", 0))
    observer = fleet.observer()
    observer.opened(refit_work("r", 1, headers, transport="shared_memory", weight_version=2))
    observer.transition(change(P.STARTING, "BootedWith", P.SERVING, 2, version=1))
    for each in whole_refit("r", 10, policy="keep", live=3, bytes=640, tensors=4, released=3):
        observer.transition(each)
    observer.closed("refit:r", 60, detail={"outcome": "committed", "replicas": 1})
    sender = trainer.begun[0]
    assert sender.kind is SpanKind.PRODUCER
    root, part, receive = (fleet.one(n) for n in (names.REFIT, names.REFIT_REPLICA, names.RECEIVE_WEIGHTS))
    assert parent_id(root) == context(sender).span_id
    assert {context(span).trace_id for span in (root, part, receive)} == {context(sender).trace_id}
    assert receive.kind is SpanKind.CONSUMER
    assert [link.context.span_id for link in receive.links] == [context(sender).span_id]
    assert attributes(part) == {
        "rl.replica.id": "a", "rl.replica.incarnation": 1, "rl.refit.id": "r", "rl.weight_version": 2,
        "rl.weight_version.previous": 1, "rl.transport": "shared_memory", "rl.refit.policy": "keep",
        "rl.refit.outcome": "committed", "rl.requests.live": 3, "rl.requests.released": 3,
        "rl.transfer.bytes": 640, "rl.transfer.tensors": 4,
    }  # fmt: skip
    assert attributes(root)["rl.refit.outcome"] == "committed"
    assert root.status.status_code is StatusCode.UNSET


def test_an_attribute_is_on_the_phase_that_it_is_about() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.opened(refit_work("r", 1))
    for each in whole_refit("r", 10, policy="keep", live=3, bytes=640, tensors=4, released=2, cache="cleared"):
        observer.transition(each)
    about = {
        names.SUSPEND: {"rl.requests.live": 3},
        names.RECEIVE_WEIGHTS: {"rl.transfer.bytes": 640, "rl.transfer.tensors": 4},
        names.FINALIZE: {"rl.finalize.cache": "cleared"}, names.RESUME: {"rl.requests.released": 2},
    }  # fmt: skip
    special = set(names.BELONGS)
    for name, expected in about.items():
        found = attributes(recorder.one(name))
        assert {key: value for key, value in found.items() if key in special} == expected
        assert found["rl.refit.policy"] == "keep"


def test_the_sender_in_the_same_process_is_linked_too() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.opened(refit_work("r", 1))
    observer.opened(Work("send_weights", "send_weights:r", 2, "refit:r"))
    for each in whole_refit("r", 10):
        observer.transition(each)
    observer.closed("send_weights:r", 50)
    sender = recorder.one(names.SEND_WEIGHTS)
    assert parent_id(sender) == context(recorder.begun[0]).span_id
    (link,) = recorder.one(names.RECEIVE_WEIGHTS).links
    assert (link.context.span_id, dict(link.attributes or {})) == (context(sender).span_id, {"rl.link.kind": "sent_by"})


def test_staging_is_beside_the_replicas_part_and_names_its_replica() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.opened(refit_work("r", 1, {"traceparent": CALLER + "01"}))
    observer.opened(Work("stage", "stage:r:a", 2, "refit:r"))
    observer.closed("stage:r:a", 9, "digest_mismatch")
    stage = recorder.one(names.STAGE)
    assert parent_id(stage) == context(recorder.begun[0]).span_id
    assert attributes(stage) == {"rl.replica.id": "a", "rl.refit.id": "r", "error.type": "digest_mismatch"}
    assert [link.context.span_id for link in stage.links] == [0xB7AD6B7169203331]


def test_death_ends_everything_that_the_replica_had_open_as_an_error() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.opened(refit_work("r", 1))
    for each in whole_refit("r", 10)[:2]:
        observer.transition(each)
    observer.transition(change(P.RECEIVING, "Died", P.DEAD, 35, refit="r", error="replica_died"))
    for name in (names.RECEIVE_WEIGHTS, names.REFIT_REPLICA):
        span = recorder.one(name)
        assert (span.end_time, span.status.status_code) == (35, StatusCode.ERROR)
        assert attributes(span)["error.type"] == "replica_died"
    assert attributes(recorder.one(names.REFIT_REPLICA))["rl.refit.outcome"] == "died"
    assert recorder.one(names.SUSPEND).status.status_code is StatusCode.UNSET


def test_a_clean_failure_is_an_error_of_its_phase_and_of_the_part_but_not_of_the_resume() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.transition(change(P.STARTING, "BootedWith", P.SERVING, 1, version=7))
    observer.opened(refit_work("r", 1))
    observer.transition(change(P.SERVING, "RefitOffered", P.SUSPENDING, 10, refit="r", version=8))
    observer.transition(change(P.SUSPENDING, "FailedClean", P.RESUMING, 20, refit="r", version=8, error="peer_lost"))
    observer.transition(change(P.RESUMING, "Resumed", P.SERVING, 30, refit="r", version=8))
    observer.cut(40)
    assert attributes(recorder.one(names.SUSPEND))["error.type"] == "peer_lost"
    assert attributes(recorder.one(names.REFIT_REPLICA))["rl.refit.outcome"] == "failed"
    assert recorder.one(names.RESUME).status.status_code is StatusCode.UNSET
    before, after = recorder.named(names.SERVE)
    assert attributes(after)["rl.weight_version"] == 7, "it still serves what it had"
    assert [link.context.span_id for link in after.links] == [context(recorder.one(names.REFIT_REPLICA)).span_id]
    assert "rl.span.truncated" in attributes(after)
    assert "rl.span.truncated" not in attributes(before)


def test_a_message_never_becomes_an_error_type() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.opened(refit_work("r", 1))
    observer.closed("refit:r", 2, "tensor model.layers.3.weight has 17 bytes too many")
    assert attributes(recorder.one(names.REFIT))["error.type"] == "_OTHER"


def test_unknown_repeated_and_forgotten_work_is_counted_not_raised() -> None:
    recorder = Recorder()
    observer = recorder.observer(level=2)
    observer.closed("refit:x", 1)
    observer.closed("generate:x", 1)
    assert observer.opened(Work("breakfast", "b", 1, headers={"a": "b"})) == {"a": "b"}
    observer.opened(refit_work("r", 1, prompt="secret"))
    observer.opened(refit_work("r", 2))
    observer.transition(change(P.IDLE, "RefitOffered", P.RECEIVING, 3, refit="nobody's"))
    assert recorder.dropped == {
        ("span", "unknown_key"): 2, ("span", "unknown_kind"): 1, ("attribute", "unknown_detail"): 1,
        ("span", "duplicate_key"): 1, ("span", "unknown_refit"): 1,
    }  # fmt: skip
    (cut,) = recorder.named(names.REFIT)
    assert attributes(cut) == {"rl.refit.id": "r", "rl.span.truncated": True}


def test_what_a_dead_incarnation_says_late_changes_nothing() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.transition(change(P.DEAD, "RestartAsked", P.STARTING, 1, incarnation=2))
    observer.transition(change(P.RECEIVING, "Died", P.DEAD, 2, incarnation=1))
    observer.transition(change(P.STARTING, "BootedEmpty", P.IDLE, 3, incarnation=2))
    assert [(span.name, span.start_time, span.end_time) for span in recorder.ended] == [(names.BOOT, 1, 3)]
    assert recorder.dropped == {("transition", "stale_incarnation"): 1}


def test_a_clock_that_steps_back_gives_no_negative_spans() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    observer.transition(change(P.STARTING, "BootedEmpty", P.IDLE, 100))
    observer.transition(change(P.IDLE, "SleepAsked", P.SLEEPING, 90, level=2))
    observer.cut(80)
    assert [(span.name, span.start_time, span.end_time) for span in recorder.ended] == [
        (names.IDLE, 100, 100),
        (names.SLEEP, 100, 100),
    ]
    observer.opened(refit_work("r", 100))
    observer.closed("refit:r", 90)
    assert recorder.one(names.REFIT).end_time == 100


def test_the_callers_current_span_is_the_parent_of_work_without_headers() -> None:
    recorder = Recorder()
    observer = recorder.observer()
    with recorder.tracer.start_as_current_span("training step") as step:
        observer.opened(refit_work("r", 1))
        observer.transition(change(P.STARTING, "BootedEmpty", P.IDLE, 2))
    observer.closed("refit:r", 3)
    observer.cut(4)
    assert parent_id(recorder.one(names.REFIT)) == step.get_span_context().span_id
    assert parent_id(recorder.one(names.IDLE)) is None
    assert trace.get_current_span() is trace.INVALID_SPAN


@pytest.mark.parametrize(
    ("headers", "draw", "recorded"),
    [
        pytest.param({}, 0.04, True, id="drawn"),
        pytest.param({}, 0.06, False, id="not drawn"),
        pytest.param({"traceparent": CALLER + "01"}, 0.9, True, id="the caller's trace is sampled"),
        pytest.param({"Traceparent": CALLER + "01"}, 0.9, True, id="whatever the case"),
        pytest.param({"traceparent": CALLER + "00"}, 0.0, False, id="the caller's trace is not sampled"),
        pytest.param({"traceparent": "nonsense"}, 0.0, True, id="headers that name nothing"),
    ],
)
def test_a_request_is_sampled_with_its_callers_trace_or_by_ratio(
    headers: dict[str, str], draw: float, recorded: bool
) -> None:
    recorder = Recorder()
    observer = recorder.observer(level=2, sample=0.05, draw=draw)
    answer = observer.opened(generate("q", 5, headers | {"baggage": "k=v"}))
    observer.closed("generate:q", 9, detail={"finish_reason": "stop"})
    assert len(recorder.named(names.GENERATE)) == recorded
    assert answer["baggage"] == "k=v"
    if recorded:
        named = w3c.extract(answer)
        assert named is not None
        assert named.span_id == context(recorder.one(names.GENERATE)).span_id
    else:
        assert answer == headers | {"baggage": "k=v"}


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (None, {"finish_reason": "stop", "holds": 1}),
        ("replica_died", {"finish_reason": "error"}),
        ("deadline_exceeded", {"finish_reason": "abort"}),
        (None, {"finish_reason": "error"}),
    ],
)
def test_a_request_that_was_held_or_failed_is_recorded_after_the_fact(
    error: str | None, detail: dict[str, str | int]
) -> None:
    recorder = Recorder()
    observer = recorder.observer(level=2)
    observer.opened(generate("q", 1_000, {"traceparent": CALLER + "00"}, max_tokens=8, prompt_tokens=3))
    assert recorder.begun == []
    observer.closed("generate:q", 9_000_001_000, error, detail | {"first_token_at": 2_000_001_000})
    span = recorder.one(names.GENERATE)
    assert (span.start_time, span.end_time) == (1_000, 9_000_001_000)
    assert span.parent is not None
    assert f"{span.parent.span_id:x}" == CALLER.split("-")[2]
    found = attributes(span)
    assert found["gen_ai.response.finish_reasons"] == (detail["finish_reason"],)
    assert found["gen_ai.response.time_to_first_chunk"] == 2.0
    assert found["gen_ai.request.max_tokens"] == 8
    assert found["gen_ai.usage.input_tokens"] == 3
    failed = error or ("_OTHER" if detail["finish_reason"] == "error" else None)
    assert found.get("error.type") == failed
    assert (span.status.status_code is StatusCode.ERROR) == (failed is not None)


def test_level_one_has_no_spans_of_requests() -> None:
    recorder = Recorder()
    observer = recorder.observer(sample=1.0)
    headers = {"traceparent": CALLER + "01"}
    assert observer.opened(generate("q", 1, headers)) is headers
    observer.closed("generate:q", 2, "replica_died", {"finish_reason": "error"})
    assert (recorder.begun, recorder.dropped) == ([], {})
