"""The codec: what goes in comes out; anything else is a typed error, whatever it is."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitstop.engine.errors import (
    DigestMismatch,
    ErrorRecord,
    OfferRejected,
    PitstopError,
    ProtocolViolation,
    RemoteError,
)
from pitstop.engine.refit import POLICIES, Deadlines, Outcome, RefitReport, ReplicaReport
from pitstop.engine.worker_ports import ITEMSIZE, Offer, TensorSpec
from pitstop.transports import messages as m
from pitstop.transports.codec import encode, fault, from_client, from_engine, numbers, raised, words
from pitstop.transports.reports import WISHES, offered, propose, reported, settled

text = st.text(max_size=30)
ids = st.text("0123456789abcdef", min_size=1, max_size=64)
natural = st.integers(0, (1 << 62) - 1)
pids = st.integers(0, (1 << 31) - 1)
seconds = st.floats(0, 1e6)
number = st.floats(allow_nan=False)
scalars = text | st.integers(-(1 << 63), (1 << 64) - 1) | number | st.none()
packed = st.lists(st.integers(0, 2**64 - 1), max_size=20).map(words)
faults = st.builds(m.Fault, text, text, st.dictionaries(text, scalars, max_size=4), text)
rows = st.builds(m.Row, text, st.sampled_from(m.DTYPES), st.lists(natural, max_size=4).map(tuple))
parts = st.builds(
    m.ReplicaPart,
    st.booleans(),
    st.dictionaries(text, number, max_size=3),
    natural,
    st.none() | number,
    st.none() | faults,
)
ringing = (
    st.builds(m.Lend, ids, st.binary(min_size=64, max_size=64), natural),
    st.builds(m.Filled, ids, natural),
    st.builds(m.Drained, ids, natural),
)
from_clients = st.one_of(
    st.builds(m.Hello, st.integers(0, 9), st.sampled_from(["trainer", "receiver"]), pids, natural, text),
    st.builds(
        m.Propose, ids, natural, st.lists(rows, max_size=5).map(tuple), st.sampled_from([None, "inventory"]),
        st.none() | natural, st.dictionaries(text, text, max_size=3), st.none() | text,
        st.dictionaries(text, seconds, max_size=3), st.booleans(), natural, st.none() | text, text,
    ),
    st.builds(m.Join, ids, natural, natural, seconds),
    *ringing,
    st.builds(m.Sent, ids, packed),
    st.builds(m.Faulted, ids, faults),
    st.builds(
        m.Report, ids, st.sampled_from(["attached", "landed", "failed"]), natural, seconds, st.booleans(),
        st.none() | faults,
    ),
    st.builds(m.LetGo, ids),
    st.just(m.Beat()),
    st.just(m.Bye()),
)  # fmt: skip
from_engines = st.one_of(
    st.builds(
        m.Welcome, st.integers(0, 9), text, pids, natural, text, st.binary(max_size=32),
        st.lists(text, max_size=3).map(tuple), st.none() | natural, natural,
    ),
    st.builds(m.Refuse, faults, ids),
    st.builds(
        m.Accept, ids, text, natural, packed, st.binary(max_size=20), packed, seconds,
        st.integers(0, m.MOST_SLOTS), natural, text,
    ),
    *ringing,
    st.builds(m.Cancel, ids, faults),
    st.builds(m.Seal, ids, packed),
    st.builds(m.Noted, ids),
    st.builds(
        m.Settled, ids, natural, text, text, natural, natural, number, number, st.dictionaries(text, parts, max_size=3),
        st.none() | faults, text, st.sampled_from([None, "staged", "in_place"]),
    ),
    st.just(m.Beat()),
    st.just(m.Bye()),
)  # fmt: skip


@settings(deadline=None)
@given(from_clients)
def test_what_a_client_says_arrives(message: m.FromClient) -> None:
    assert from_client(encode(message)) == message


@settings(deadline=None)
@given(from_engines)
def test_what_an_engine_says_arrives(message: m.FromEngine) -> None:
    assert from_engine(encode(message)) == message


@settings(deadline=None)
@given(from_clients | from_engines, st.floats(0, 1, exclude_max=True))
def test_a_message_cut_short_is_a_violation(message: m.FromClient | m.FromEngine, where: float) -> None:
    frame = encode(message)
    cut = frame[: math.floor(len(frame) * where)]
    for decode in (from_client, from_engine):
        with pytest.raises(ProtocolViolation):
            decode(cut)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_a_violation(frame: bytes) -> None:
    for decode in (from_client, from_engine):
        with pytest.raises(ProtocolViolation):
            decode(frame)


@settings(max_examples=200, deadline=None)
@given(from_clients, st.integers(0, 1 << 30), st.integers(0, 255))
def test_a_damaged_message_is_a_message_or_a_violation(message: m.FromClient, where: int, byte: int) -> None:
    frame = bytearray(encode(message))
    frame[where % len(frame)] = byte
    try:
        found = from_client(bytes(frame))
    except ProtocolViolation:
        return
    assert isinstance(found, m.FromClient)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\xa4type\xa7Propose\xa7tensors\xdd\xff\xff\xff\xff",
        b"\x83\xa4type\xa7Propose\xa7tensors\x91\x93\xa1a\xa8bfloat16\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Sent\xa7digests\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa7Propose\xa7headers\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x84\xa4type\xa4Lend\xa8refit_id\xa1a\xa6handle\xc4\x01a\xa6nbytes\x01",
        b"\x83\xa4type\xa6Filled\xa8refit_id\xa1a\xa7buckets\xff",
        b"\x83\xa4type\xa7Drained\xa8refit_id\xa1a\xa7buckets\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
    ids=["tensors", "dimensions", "bytes", "headers", "nesting", "handle", "below nothing", "beyond counting"],
)
def test_claimed_sizes_are_refused_before_memory_is_taken(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        from_client(frame)


def test_too_large_messages_go_neither_out_nor_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pitstop.transports.codec.MOST_BYTES", 100)
    with pytest.raises(ProtocolViolation, match="above 100"):
        encode(m.Sent("r", bytes(200)))
    with pytest.raises(ProtocolViolation, match="above 100"):
        from_client(bytes(101))


def test_what_does_not_fit_is_a_violation_and_not_a_crash() -> None:
    for message in (
        m.Propose("r", 1, (m.Row("a\ud800", "int8", ()),)),
        m.Propose("r", 1 << 70, ()),
    ):
        with pytest.raises(ProtocolViolation):
            encode(message)


def test_unknown_fields_are_refused_except_where_versions_meet() -> None:
    extra = {"type": "Sent", "refit_id": "r", "digests": b"", "code": "rm"}
    with pytest.raises(ProtocolViolation):
        from_client(msgspec.msgpack.encode(extra))
    hello = {"type": "Hello", "protocol": 99, "role": "trainer", "pid": 1, "pid_space": 1, "new": True}
    assert from_client(msgspec.msgpack.encode(hello)) == m.Hello(99, "trainer", 1, 1)


def test_digests_of_odd_length_are_a_violation() -> None:
    assert numbers(words([0, 1, 2**64 - 1])) == (0, 1, 2**64 - 1)
    with pytest.raises(ProtocolViolation):
        numbers(bytes(7))


def test_errors_arrive_as_what_they_were() -> None:
    error = DigestMismatch("2 tensors differ", tensor="a.b", count=2)
    error.remote_traceback = "Traceback ..."
    found = raised(fault(error))
    assert (type(found), found.message, found.fields, found.remote_traceback) == (
        DigestMismatch, "2 tensors differ", {"tensor": "a.b", "count": 2}, "Traceback ...",
    )  # fmt: skip
    foreign = raised(fault(KeyError("x")))
    assert isinstance(foreign, RemoteError)
    assert "KeyError" in foreign.message
    long = fault(PitstopError("x" * 100_000, tensor="y" * 100_000))
    assert raised(m.Fault(long.slug, long.message, long.fields)).message.startswith("xxx")
    encode(m.Faulted("r", long))


def test_offers_arrive_as_they_were() -> None:
    offer = Offer(
        "r1", 7, (TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", ())), "inventory", 6, {"k": "v"}
    )
    message = from_client(encode(propose(offer, "keep", {"silence": 2.0})))
    assert isinstance(message, m.Propose)
    assert offered(message) == offer
    assert (message.policy, message.deadlines) == ("keep", {"silence": 2.0})


@pytest.mark.parametrize(
    "message",
    [
        m.Propose("r", 1, (m.Row("huge", "int64", (1 << 40, 1 << 40)),)),
        m.Propose("r", 1, (), policy="explode"),
        m.Propose("r", 1, (), deadlines={"forever": 1.0}),
    ],
    ids=["size", "policy", "deadline"],
)
def test_offers_that_cannot_be_are_violations(message: m.Propose) -> None:
    with pytest.raises(ProtocolViolation):
        offered(message)


def test_reports_arrive_as_they_were() -> None:
    error = OfferRejected("no", tensor="a")
    parts = {"r0": ReplicaReport("r0", True, {"stage": 0.5}, 3, 0.1), "r1": ReplicaReport("r1", False, {}, error=error)}
    report = RefitReport("r1", 7, Outcome.PARTIAL, "shared_memory", 10, 2, 1.5, 0.5, parts, None)
    message = from_engine(encode(settled(report)))
    assert isinstance(message, m.Settled)
    found = reported(message)
    assert found.replicas["r0"] == parts["r0"]
    assert found.replicas["r1"].error is not None
    assert found.replicas["r1"].error.record() == ErrorRecord("offer_rejected", "no", {"tensor": "a"})
    assert {f.name: getattr(found, f.name) for f in fields(found) if f.name != "replicas"} == {
        f.name: getattr(report, f.name) for f in fields(report) if f.name != "replicas"
    }
    with pytest.raises(ProtocolViolation):
        reported(m.Settled("r", 1, "splendid", "", 0, 0, 0.0, 0.0))


def test_tables_agree_with_the_engines() -> None:
    assert set(m.DTYPES) == set(get_args(m.Dtype)) == set(ITEMSIZE)
    assert {f.name for f in fields(Deadlines)} >= WISHES
    assert POLICIES
