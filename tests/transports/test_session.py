"""Who may say what when."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine.errors import DeadlineExceeded, PeerLost, ProtocolViolation
from pitstop.transports.deadline import Limit, Silence
from pitstop.transports.messages import (
    PROTOCOL,
    Beat,
    Bye,
    Fault,
    Faulted,
    FromClient,
    Hello,
    Join,
    LetGo,
    Propose,
    Report,
    Sent,
)
from pitstop.transports.session import MOST_OPEN, Session, Stage, Step, greeted

NO = Fault("remote_error", "no")
OFFER, SENT, FAULTED = Propose("r", 1, ()), Sent("r", b""), Faulted("r", NO)
ATTACHED, LANDED, FAILED = Report("r", "attached"), Report("r", "landed"), Report("r", "failed", error=NO)
LET_GO = LetGo("r")
JOIN = Join("r", 1, 0)
ALL: list[FromClient] = [
    Hello(1, "trainer", 1, 1),
    OFFER,
    JOIN,
    SENT,
    FAULTED,
    ATTACHED,
    LANDED,
    FAILED,
    LET_GO,
    Beat(),
    Bye(),
]


def trainer(*said: FromClient) -> Session:
    session = Session("trainer")
    for message in said:
        assert session.heard(message)
        if message is OFFER:
            session.accepted("r")
    return session


def receiver(*said: FromClient) -> Session:
    session = Session("receiver", "r")
    for message in said:
        assert session.heard(message)
    return session


@pytest.mark.parametrize(
    ("session", "allowed"),
    [
        (trainer(), [OFFER]),
        (trainer(OFFER), [SENT, FAULTED]),
        (trainer(OFFER, SENT), []),
        (trainer(OFFER, FAULTED), []),
        (Session("trainer", rank=1), [JOIN]),
        (receiver(), [ATTACHED, FAILED, LET_GO]),
        (receiver(ATTACHED), [LANDED, FAILED]),
        (receiver(ATTACHED, LANDED), [LET_GO]),
        (receiver(FAILED), [LET_GO]),
    ],
    ids=["new", "sending", "sent", "faulted", "rank 1", "welcome", "attached", "landed", "failed"],
)
def test_everything_else_is_a_violation_and_changes_nothing(session: Session, allowed: list[FromClient]) -> None:
    for message in ALL:
        if message in (*allowed, Beat(), Bye()):
            continue
        before = (dict(session.stages), session.step)
        with pytest.raises(ProtocolViolation):
            session.heard(message)
        assert (session.stages, session.step) == before


def test_nothing_is_sent_before_it_was_accepted() -> None:
    session = Session("trainer")
    session.heard(OFFER)
    with pytest.raises(ProtocolViolation):
        session.heard(SENT)
    assert session.heard(FAULTED)


def test_what_crosses_with_the_end_of_its_refit_does_not_count() -> None:
    session = trainer(OFFER)
    session.settled("r")
    assert session.heard(SENT) is False
    assert session.heard(FAULTED) is False
    with pytest.raises(ProtocolViolation):
        session.heard(OFFER)


def test_a_trainer_cannot_pile_up_offers() -> None:
    session = Session("trainer")
    for n in range(MOST_OPEN):
        session.heard(Propose(f"r{n}", n, ()))
    with pytest.raises(ProtocolViolation):
        session.heard(Propose("one more", 99, ()))
    session.settled("r0")
    assert session.heard(Propose("one more", 99, ()))


@pytest.mark.parametrize(
    "message", [Report("r", "landed", error=NO), Report("r", "failed"), Report("other", "attached"), LetGo("other")]
)
def test_reports_that_make_no_sense_are_violations(message: FromClient) -> None:
    with pytest.raises(ProtocolViolation):
        receiver(ATTACHED).heard(message)


def test_clients_open_with_hello_in_the_engines_protocol() -> None:
    hello = Hello(PROTOCOL, "trainer", 1, 1)
    assert greeted(hello) is hello
    for message in (*ALL[1:], Hello(PROTOCOL + 1, "trainer", 1, 1)):
        with pytest.raises(ProtocolViolation):
            greeted(message)


@given(st.lists(st.sampled_from(ALL), max_size=12), st.sampled_from(["trainer", "receiver"]))
def test_no_order_of_messages_does_more_than_raise(said: list[FromClient], role: str) -> None:
    session = Session("trainer") if role == "trainer" else Session("receiver", "r")
    for message in said:
        with contextlib.suppress(ProtocolViolation):
            session.heard(message)
    assert set(session.stages) <= {"r"}
    assert session.stages.get("r") in (None, Stage.OFFERED, Stage.DONE)
    assert isinstance(session.step, Step)


def test_limits_and_silence_go_by_the_given_clock() -> None:
    now = 100.0
    limit, silence = Limit(5.0, lambda: now), Silence(2.0, lambda: now)
    now = 102.0
    assert limit.left() == 3.0
    silence.check("trainer")
    silence.heard()
    now = 104.5
    with pytest.raises(PeerLost, match=r"trainer said nothing for 2 s"):
        silence.check("trainer")
    silence.check("trainer", seconds=3.0)
    limit.check("receiving")
    now = 105.0
    with pytest.raises(DeadlineExceeded, match="receiving took longer than 5 s") as caught:
        limit.check("receiving", rank=1)
    assert caught.value.fields == {"seconds": 5.0, "rank": 1}
    assert limit.left() == 0.0
