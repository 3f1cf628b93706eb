"""Every name that telemetry writes: spans, metrics, attributes, units, buckets, and the details that become attributes.

`gen_ai.*` follows semantic-conventions-genai v0.1.0, all of it Development there; `error.type` and `service.*` follow
semantic-conventions v1.44.0 and are stable. The package `opentelemetry-semantic-conventions` still has the names that
v0.1.0 replaced, so nothing is imported from it. `rl.*` is Pitstop's own.

An attribute is written only if its name is here: that is what keeps prompts and ids of tensors out of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

GENAI_CONVENTIONS: Final = "0.1.0"
CONVENTIONS: Final = "1.44.0"
SCOPE: Final = "pitstop"

# Resource
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
RUN_ID: Final = "rl.run.id"
ROLE: Final = "rl.role"

# What a replica does, by phase: these tile its life from boot to death.
BOOT: Final = "rl.boot"
IDLE: Final = "rl.idle"
SERVE: Final = "rl.serve"
SUSPEND: Final = "rl.suspend"
RECEIVE_WEIGHTS: Final = "rl.receive_weights"
FINALIZE: Final = "rl.finalize"
RESUME: Final = "rl.resume"
SLEEP: Final = "rl.sleep"
QUARANTINE: Final = "rl.quarantine"

REFIT_REPLICA: Final = "rl.refit_replica"
REFIT: Final = "rl.refit"
STAGE: Final = "rl.stage"
SEND_WEIGHTS: Final = "rl.send_weights"
GENERATE: Final = "rl.generate"

# Common attributes
ERROR_TYPE: Final = "error.type"
OTHER_ERROR: Final = "_OTHER"
REPLICA_ID: Final = "rl.replica.id"
REPLICA_INCARNATION: Final = "rl.replica.incarnation"
REPLICA_STATE: Final = "rl.replica.state"
WEIGHT_VERSION: Final = "rl.weight_version"
PREVIOUS_VERSION: Final = "rl.weight_version.previous"
BASE_VERSION: Final = "rl.weight_version.base"
TRUNCATED: Final = "rl.span.truncated"
LINK_KIND: Final = "rl.link.kind"

# Refits
REFIT_ID: Final = "rl.refit.id"
REFIT_KIND: Final = "rl.refit.kind"
REFIT_POLICY: Final = "rl.refit.policy"
REFIT_MODE: Final = "rl.refit.mode"
REFIT_STAGING: Final = "rl.refit.staging"
REFIT_STAGING_REASON: Final = "rl.refit.staging_reason"
REFIT_OUTCOME: Final = "rl.refit.outcome"
REFIT_REPLICAS: Final = "rl.refit.replicas"
REFIT_PHASE: Final = "rl.refit.phase"
REFIT_BUBBLE: Final = "rl.refit.bubble"
TRANSPORT: Final = "rl.transport"
TRANSFER_BYTES: Final = "rl.transfer.bytes"
TRANSFER_TENSORS: Final = "rl.transfer.tensors"
TRANSFER_BUCKETS: Final = "rl.transfer.buckets"
TRANSFER_RECEIVERS: Final = "rl.transfer.receivers"
TRANSFER_DIRECTION: Final = "rl.transfer.direction"
REQUESTS_IN_FLIGHT: Final = "rl.requests.in_flight"
REQUESTS_LIVE: Final = "rl.requests.live"
REQUESTS_HELD: Final = "rl.requests.held"
REQUESTS_RELEASED: Final = "rl.requests.released"
FINALIZE_CACHE: Final = "rl.finalize.cache"
FINALIZE_COPIED: Final = "rl.finalize.copied"
FINALIZE_STRAIGHT: Final = "rl.finalize.straight"
FINALIZE_RELOADED: Final = "rl.finalize.reloaded"
FINALIZE_WHY: Final = "rl.finalize.why_reloaded"
SLEEP_LEVEL: Final = "rl.sleep.level"

# Requests
REQUEST_ID: Final = "rl.request.id"
REQUEST_HOLDS: Final = "rl.request.holds"
REQUEST_SEGMENTS: Final = "rl.request.segments"
FIRST_VERSION: Final = "rl.weight_version.first"
LAST_VERSION: Final = "rl.weight_version.last"
ADAPTER: Final = "rl.adapter.name"
ADAPTER_VERSION: Final = "rl.adapter.version"
GENAI_OPERATION: Final = "gen_ai.operation.name"
GENAI_PROVIDER: Final = "gen_ai.provider.name"
GENAI_MODEL: Final = "gen_ai.request.model"
GENAI_STREAM: Final = "gen_ai.request.stream"
GENAI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GENAI_TEMPERATURE: Final = "gen_ai.request.temperature"
GENAI_TOP_P: Final = "gen_ai.request.top_p"
GENAI_TOP_K: Final = "gen_ai.request.top_k"
GENAI_SEED: Final = "gen_ai.request.seed"
GENAI_CONVERSATION: Final = "gen_ai.conversation.id"
GENAI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GENAI_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GENAI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GENAI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GENAI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

# Metrics only
FINISH: Final = "rl.request.finish_reason"
FROM: Final = "rl.transition.from"
TO: Final = "rl.transition.to"
EVENT: Final = "rl.event"
STALENESS_AT: Final = "rl.staleness.at"
RECOVERY: Final = "rl.recovery.outcome"
SIGNAL: Final = "rl.telemetry.signal"
REASON: Final = "rl.telemetry.reason"

DETAILS: Final[Mapping[str, str]] = MappingProxyType({
    "replica": REPLICA_ID, "incarnation": REPLICA_INCARNATION, "state": REPLICA_STATE, "event": EVENT,
    "refit_id": REFIT_ID, "kind": REFIT_KIND, "policy": REFIT_POLICY, "mode": REFIT_MODE,
    "staging": REFIT_STAGING, "staging_reason": REFIT_STAGING_REASON,
    "outcome": REFIT_OUTCOME, "replicas": REFIT_REPLICAS, "phase": REFIT_PHASE, "transport": TRANSPORT,
    "weight_version": WEIGHT_VERSION, "previous": PREVIOUS_VERSION, "base_version": BASE_VERSION,
    "bubble": REFIT_BUBBLE, "bytes": TRANSFER_BYTES, "tensors": TRANSFER_TENSORS, "buckets": TRANSFER_BUCKETS,
    "receivers": TRANSFER_RECEIVERS, "direction": TRANSFER_DIRECTION,
    "flights": REQUESTS_IN_FLIGHT, "live": REQUESTS_LIVE, "held": REQUESTS_HELD, "released": REQUESTS_RELEASED,
    "cache": FINALIZE_CACHE, "copied": FINALIZE_COPIED, "straight": FINALIZE_STRAIGHT,
    "reloaded": FINALIZE_RELOADED, "why_reloaded": FINALIZE_WHY, "level": SLEEP_LEVEL,
    "request_id": REQUEST_ID, "holds": REQUEST_HOLDS, "segments": REQUEST_SEGMENTS,
    "version_first": FIRST_VERSION, "version_last": LAST_VERSION,
    "adapter": ADAPTER, "adapter_version": ADAPTER_VERSION,
    "operation": GENAI_OPERATION, "provider": GENAI_PROVIDER, "model": GENAI_MODEL, "stream": GENAI_STREAM,
    "max_tokens": GENAI_MAX_TOKENS, "temperature": GENAI_TEMPERATURE, "top_p": GENAI_TOP_P, "top_k": GENAI_TOP_K,
    "seed": GENAI_SEED, "session_id": GENAI_CONVERSATION, "finish_reason": GENAI_FINISH_REASONS,
    "prompt_tokens": GENAI_INPUT_TOKENS,
    "output_tokens": GENAI_OUTPUT_TOKENS, "cached_tokens": GENAI_CACHED_TOKENS,
    "at": STALENESS_AT, "recovery": RECOVERY, "signal": SIGNAL, "reason": REASON,
})  # fmt: skip
"""What the keys of `Transition.detail`, `Work.detail`, `closed` and `counted` are called when written."""

UNWRITTEN: Final = frozenset({"first_token_at", "seconds"})
"""Detail keys that are no attribute: a duration is what a span is, and `first_token_at` becomes one."""

BELONGS: Final[Mapping[str, str]] = MappingProxyType({
    TRANSFER_BYTES: RECEIVE_WEIGHTS, TRANSFER_TENSORS: RECEIVE_WEIGHTS, REQUESTS_LIVE: SUSPEND,
    REQUESTS_RELEASED: RESUME, FINALIZE_CACHE: FINALIZE, FINALIZE_COPIED: FINALIZE, FINALIZE_STRAIGHT: FINALIZE,
    FINALIZE_RELOADED: FINALIZE, FINALIZE_WHY: FINALIZE,
})  # fmt: skip
"""Of a replica's phases, the one that an attribute is about. On the others it would be counted again."""


@dataclass(frozen=True, slots=True)
class SpanName:
    """A kind of span. Level 1 is always recorded, level 2 is sampled."""

    name: str
    level: int
    about: str


@dataclass(frozen=True, slots=True)
class Metric:
    """An instrument, and the only attributes that it may carry: ids belong on spans."""

    name: str
    kind: Literal["counter", "updown", "histogram"]
    unit: str
    about: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PHASE_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_CLIENT_SECONDS: Final = tuple(0.01 * 2**n for n in range(14))
_INFERENCE: Final = (GENAI_OPERATION, GENAI_PROVIDER, GENAI_MODEL)

SPANS: Final[Mapping[str, SpanName]] = MappingProxyType({
    span.name: span
    for span in (
        SpanName(REFIT, 1, "one weight version, from the offer to the last replica"),
        SpanName(REFIT_REPLICA, 1, "one replica's part, from its suspend to its resume"),
        SpanName(STAGE, 1, "a replica receives into spare memory while it serves"),
        SpanName(SEND_WEIGHTS, 1, "the trainer's side of a refit"),
        SpanName(BOOT, 1, "the engine boots"),
        SpanName(IDLE, 1, "the replica has no committed version"),
        SpanName(SERVE, 1, "the replica serves one version"),
        SpanName(SUSPEND, 1, "requests in flight are treated as the policy says"),
        SpanName(RECEIVE_WEIGHTS, 1, "weights go into the live parameters"),
        SpanName(FINALIZE, 1, "post-load work, proof, caches"),
        SpanName(RESUME, 1, "held work is released"),
        SpanName(SLEEP, 1, "memory is given back"),
        SpanName(QUARANTINE, 1, "live weights are not to be trusted"),
        SpanName(GENERATE, 2, "one request, from admission to its end"),
    )
})  # fmt: skip

DROPPED: Final = "rl.telemetry.dropped"
"""What telemetry lost, by `rl.telemetry.signal` (span, metric, attribute, observer) and `rl.telemetry.reason`.

On the way in: `unknown_detail`, `unknown_name`, `not_a_number` (nothing declared of that name), `unknown_key`,
`duplicate_key` (closed unopened, opened twice), `too_many_open`, `too_many_pending`, `queue_full` (a bound was met),
`raised` (an observer's fault), `closed` (after the end). At the journal: `exporter_failed`, `outbox_failed`.

At the collector: `unreachable` (refused, reset, no such host), `timeout`, `http_<status>`, `unreadable_answer` (not
HTTP, or not OTLP), `rejected` (it took the rest), `exporter_failed`. What it may yet take waits and counts only when it
is given up: as `queue_full`, or at the end for whatever kept it from arriving. A metric lost there is one set of all
numbers.
"""
REFIT_DURATION: Final = "rl.refit.duration"
PHASE_DURATION: Final = "rl.refit.phase.duration"
BUBBLE: Final = "rl.suspend.bubble"
STATUS: Final = "rl.replica.status"
TRANSITIONS: Final = "rl.replica.transitions"
ILLEGAL_EVENTS: Final = "rl.replica.illegal_events"
RECOVERIES: Final = "rl.replica.recoveries"
DRAFTER_ACCEPTANCE: Final = "rl.drafter.acceptance"
DRAFTER_DROPS: Final = "rl.drafter.drops"
REQUESTS: Final = "rl.requests"
REQUESTS_ACTIVE: Final = "rl.requests.active"
STALENESS: Final = "rl.staleness"
INFERENCE_DURATION: Final = "gen_ai.client.inference.duration"
INFERENCE_FIRST_CHUNK: Final = "gen_ai.client.inference.time_to_first_chunk"
INFERENCE_PER_CHUNK: Final = "gen_ai.client.inference.time_per_output_chunk"
INFERENCE_INPUT: Final = "gen_ai.client.inference.usage.input_tokens"
INFERENCE_OUTPUT: Final = "gen_ai.client.inference.usage.output_tokens"

METRICS: Final[Mapping[str, Metric]] = MappingProxyType({
    metric.name: metric
    for metric in (
        Metric(REFIT_DURATION, "histogram", "s", "From offer to end", (TRANSPORT, REFIT_OUTCOME, ERROR_TYPE), _SECONDS),
        Metric(
            PHASE_DURATION, "histogram", "s", "One replica in one phase of a refit",
            (REFIT_PHASE, TRANSPORT, ERROR_TYPE), _PHASE_SECONDS,
        ),
        Metric(
            BUBBLE, "histogram", "s",
            "Per replica, last token before a suspend to first after, with work pending throughout",
            (TRANSPORT,), _PHASE_SECONDS,
        ),
        Metric(TRANSFER_BYTES, "counter", "By", "Weights moved", (TRANSPORT, TRANSFER_DIRECTION)),
        Metric(STATUS, "updown", "1", "Replicas in each state", (REPLICA_STATE,)),
        Metric(TRANSITIONS, "counter", "{transition}", "Changes of phase", (FROM, TO)),
        Metric(ILLEGAL_EVENTS, "counter", "{event}", "Events the lifecycle has no row for", (REPLICA_STATE, EVENT)),
        Metric(
            RECOVERIES, "counter", "{recovery}",
            "Automatic recoveries of lost replicas: recovered, failed (and tried again), given_up", (RECOVERY,),
        ),
        Metric(
            DRAFTER_ACCEPTANCE, "histogram", "1", "Accepted of all draft tokens, by version and replica",
            (), tuple(n / 10 for n in range(1, 10)),
        ),
        Metric(DRAFTER_DROPS, "counter", "{drop}", "Versions under which a drafter was accepted far less than at best"),
        Metric(REQUESTS, "counter", "{request}", "Requests that ended", (FINISH, ERROR_TYPE)),
        Metric(REQUESTS_ACTIVE, "updown", "{request}", "Requests that have begun and not ended"),
        Metric(
            STALENESS, "histogram", "{version}", "Newest version less the version that made the token",
            (STALENESS_AT,), (0, 1, 2, 3, 4, 6, 8, 16, 32),
        ),
        Metric(
            INFERENCE_DURATION, "histogram", "s", "One request", (*_INFERENCE, ERROR_TYPE), _CLIENT_SECONDS
        ),
        Metric(INFERENCE_FIRST_CHUNK, "histogram", "s", "Until the first tokens", _INFERENCE, _CLIENT_SECONDS),
        Metric(
            INFERENCE_PER_CHUNK, "histogram", "s", "Mean time per token after the first", _INFERENCE,
            _CLIENT_SECONDS,
        ),
        Metric(INFERENCE_INPUT, "counter", "{token}", "Prompt tokens", _INFERENCE),
        Metric(INFERENCE_OUTPUT, "counter", "{token}", "Generated tokens", _INFERENCE),
        Metric(DROPPED, "counter", "{item}", "What telemetry could not record", (SIGNAL, REASON)),
    )
})  # fmt: skip

ATTRIBUTES: Final = frozenset(
    {
        *DETAILS.values(), GENAI_FIRST_CHUNK, *(name for metric in METRICS.values() for name in metric.attributes),
        ERROR_TYPE, TRUNCATED, LINK_KIND, SERVICE_NAME, SERVICE_INSTANCE_ID, RUN_ID, ROLE,
    }
)  # fmt: skip
