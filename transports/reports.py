"""Offers, places and reports as what travels, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from numbers import Real
from typing import Final, cast

from pitstop.engine.errors import InvalidRequest, OfferRejected, ProtocolViolation, UnsupportedPolicy
from pitstop.engine.refit import POLICIES, Outcome, RefitReport, ReplicaReport
from pitstop.engine.worker_ports import ITEMSIZE, MODES, Manifest, Offer, TensorSpec, Ticket
from pitstop.transports.codec import fault, numbers, raised, words
from pitstop.transports.deadline import BEAT_S, SILENCE_S
from pitstop.transports.messages import (
    DTYPES,
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_DIMENSIONS,
    MOST_HEADERS,
    MOST_SECONDS,
    MOST_TENSORS,
    WHOLE,
    Accept,
    Dtype,
    Propose,
    ReplicaPart,
    Row,
    Settled,
)
from pitstop.transports.packing import Slot

WISHES: Final = frozenset(
    {"suspend", "drain", "receive", "receive_per_gib", "finalize", "resume", "control", "silence"}
)
"""Deadlines that a trainer may set for its refit."""

_CODES: Final = {name: code for code, name in enumerate(DTYPES)}
_MOST: Final = 1 << 56


def propose(
    offer: Offer,
    policy: str | None,
    deadlines: dict[str, float],
    *,
    rebase: bool = False,
    number: int = 0,
    mode: str | None = None,
) -> Propose:
    """Return an offer as what travels."""
    rows = tuple(Row(spec.name, cast(Dtype, spec.dtype), spec.shape) for spec in offer.tensors)
    return Propose(
        offer.refit_id, offer.weight_version, rows, offer.cast, offer.base_version, offer.headers, policy, deadlines,
        rebase, number, mode, offer.device, offer.vocabulary,
    )  # fmt: skip


def offered(message: Propose) -> Offer:
    """Return what a trainer offers.

    Raises:
        ProtocolViolation: a size, a policy, a mode or a deadline that cannot be.
    """
    total = sum(ITEMSIZE[row.dtype] * prod(row.shape) for row in message.tensors)
    if total > _MOST:
        raise ProtocolViolation(f"an offer of {total} bytes")
    if message.policy is not None and message.policy not in POLICIES:
        raise ProtocolViolation(f"policy {message.policy!r} is not one of {', '.join(POLICIES)}")
    if message.mode is not None and message.mode not in MODES:
        raise ProtocolViolation(f"mode {message.mode!r} is not one of {', '.join(MODES)}")
    if unknown := message.deadlines.keys() - WISHES:
        raise ProtocolViolation(f"no such deadline: {', '.join(sorted(unknown))}")
    specs = tuple(TensorSpec(row.name, row.dtype, row.shape) for row in message.tensors)
    return Offer(
        message.refit_id, message.weight_version, specs, message.cast, message.base_version, dict(message.headers),
        message.device, message.vocabulary,
    )  # fmt: skip


def accept(manifest: Manifest, ticket: Ticket) -> Accept:
    """Say where each row of a manifest goes."""
    indices = words(row.index for row in manifest.rows)
    dtypes = bytes(_CODES[cast(Dtype, row.spec.dtype)] for row in manifest.rows)
    offsets = b"" if ticket.slots else words(placed.offset for placed in ticket.tensors)
    starts = counts = b""
    if any(row.start is not None for row in manifest.rows):
        starts = words(row.start or 0 for row in manifest.rows)
        counts = words(WHOLE if row.start is None else prod(row.spec.shape) for row in manifest.rows)
    return Accept(
        ticket.refit_id, ticket.buffer, ticket.nbytes, indices, dtypes, offsets, ticket.silence_s,
        ticket.slots, ticket.slot_nbytes, ticket.device, starts, counts,
    )  # fmt: skip


def way_of(ticket: Ticket) -> str:
    """Name the way that a ticket's weights travel."""
    if ticket.device:
        return "cuda_ipc"
    return "shared_memory_ring" if ticket.slots else "shared_memory"


def accepted(message: Accept) -> list[Slot]:
    """Return where the engine wants each tensor; with a ring, all at 0.

    Raises:
        ProtocolViolation: rows that do not fit together.
    """
    indices = numbers(message.indices)
    offsets = (0,) * len(indices) if message.slots else numbers(message.offsets)
    if not len(indices) == len(offsets) == len(message.dtypes) or any(code >= len(DTYPES) for code in message.dtypes):
        raise ProtocolViolation("the engine's rows are of different lengths, or of dtypes that do not exist")
    starts = numbers(message.starts) or (0,) * len(indices)
    counts = numbers(message.counts) or (WHOLE,) * len(indices)
    if not len(indices) == len(starts) == len(counts):
        raise ProtocolViolation("the engine's rows are of different lengths")
    return [
        Slot(i, DTYPES[code], at, 0, None if count == WHOLE else count, 0 if count == WHOLE else start)
        for i, code, at, start, count in zip(indices, message.dtypes, offsets, starts, counts, strict=True)
    ]


def settled(report: RefitReport) -> Settled:
    """Return a report as what travels."""
    replicas = {
        name: ReplicaPart(
            part.committed,
            dict(part.seconds),
            part.live,
            part.bubble,
            None if part.error is None else fault(part.error),
        )
        for name, part in report.replicas.items()
    }
    return Settled(
        report.refit_id, report.weight_version, report.outcome.value, report.transport, report.nbytes, report.tensors,
        report.seconds, report.sent_seconds, replicas, None if report.error is None else fault(report.error),
        mode=report.mode, staging=report.staging, staging_reason=report.staging_reason[:LONGEST_TEXT],
    )  # fmt: skip


def reported(message: Settled) -> RefitReport:
    """Return the report that an engine sent.

    Raises:
        ProtocolViolation: an outcome that does not exist.
    """
    try:
        outcome = Outcome(message.outcome)
    except ValueError:
        raise ProtocolViolation(f"no such outcome: {message.outcome!r}") from None
    replicas = {
        name: ReplicaReport(
            name,
            part.committed,
            part.seconds,
            part.live,
            part.bubble,
            None if part.error is None else raised(part.error),
        )
        for name, part in message.replicas.items()
    }
    return RefitReport(
        message.refit_id, message.weight_version, outcome, message.transport, message.nbytes, message.tensors,
        message.seconds, message.sent_seconds, replicas, None if message.error is None else raised(message.error),
        message.mode, message.staging, message.staging_reason,
    )  # fmt: skip


def judge(
    weight_version: int,
    cast: str | None,
    policy: str | None,
    deadlines: Mapping[str, float],
    mode: str | None = None,
    vocabulary: str | None = None,
) -> None:
    """Raise `InvalidRequest` or `UnsupportedPolicy` if a trainer asks for what cannot be."""
    if not isinstance(weight_version, int) or isinstance(weight_version, bool) or not 0 <= weight_version < 1 << 62:
        raise InvalidRequest(f"weight_version is {weight_version!r}, not a number from 0 on")
    if cast not in (None, "inventory"):
        raise UnsupportedPolicy(f'cast is {cast!r}, neither None nor "inventory"')
    if vocabulary not in (None, "trim"):
        raise UnsupportedPolicy(f'vocabulary is {vocabulary!r}, neither None nor "trim"')
    if policy is not None and policy not in POLICIES:
        raise UnsupportedPolicy(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    if mode is not None and mode not in MODES:
        raise UnsupportedPolicy(f"mode {mode!r} is not one of {', '.join(MODES)}")
    if unknown := deadlines.keys() - WISHES:
        raise UnsupportedPolicy(
            f"no such deadline: {', '.join(sorted(unknown))}; there are {', '.join(sorted(WISHES))}"
        )
    for name, seconds in deadlines.items():
        if not isinstance(seconds, Real) or not 0 <= seconds <= MOST_SECONDS:
            raise UnsupportedPolicy(
                f"deadline {name} is {seconds!r}, not a number of seconds from 0 to {MOST_SECONDS:g}"
            )
        if not seconds and name != "receive_per_gib":
            raise UnsupportedPolicy(f"deadline {name} is {seconds} s, not above 0")
    if deadlines.get("silence", SILENCE_S) < 2 * BEAT_S:
        raise UnsupportedPolicy(f"deadline silence is {deadlines['silence']} s; links beat every {BEAT_S} s")


def judge_offer(specs: Sequence[TensorSpec], headers: Mapping[str, str]) -> None:
    """Raise `OfferRejected`, naming the tensor, or `InvalidRequest` for what no message can say."""
    if len(specs) > MOST_TENSORS:
        raise OfferRejected(f"{len(specs)} tensors, above {MOST_TENSORS}")
    for spec in specs:
        if len(spec.name) > LONGEST_NAME:
            short = spec.name[:64]
            raise OfferRejected(
                f"{short}... has a name of {len(spec.name)} characters, above {LONGEST_NAME}", tensor=short
            )
        if len(spec.shape) > MOST_DIMENSIONS:
            raise OfferRejected(
                f"{spec.name} has {len(spec.shape)} dimensions, above {MOST_DIMENSIONS}", tensor=spec.name
            )
    if len(headers) > MOST_HEADERS:
        raise InvalidRequest(f"{len(headers)} headers, above {MOST_HEADERS}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidRequest(f"header {name!r} is {value!r}: both have to be text")
        if len(name) > LONGEST_NAME or len(value) > LONGEST_TEXT:
            raise InvalidRequest(f"header {name[:64]} is too long")
