"""One client's nonsense is one client's trouble: it ends neither the link nor anybody else's refit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from pitstop.engine.errors import InvalidRequest, OfferRejected, PitstopError, ProtocolViolation, UnsupportedPolicy
from pitstop.engine.refit import Outcome
from pitstop.transports import Publisher
from pitstop.transports.codec import encode
from pitstop.transports.messages import PROTOCOL, Hello, Propose, Refuse, Row
from pitstop.transports.zmq_link import pid_space, pidfd
from tests.transports.children import Worker
from tests.transports.rig import rig
from tests.transports.test_link import HELLO, raw, refused
from tests.transports.test_publisher import connected, settled
from tests.transports.weights import weights


@pytest.mark.parametrize("pid", [1 << 31, 1 << 40, (1 << 62) - 1])
async def test_a_process_id_that_cannot_be_ends_nothing(tmp_path: Path, pid: int) -> None:
    async with rig(tmp_path) as engine:
        with raw(engine) as rogue:
            assert "not a message" in await refused(rogue, encode(Hello(PROTOCOL, "trainer", pid, pid_space())))
        trainer = await Publisher.connect_async(engine.link.address, timeout=2.0)
        await asyncio.to_thread(trainer.close)
    assert pidfd(pid, pid_space()) is None


async def test_what_goes_wrong_with_one_message_is_answered_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: Any) -> None:
        raise OverflowError("signed integer is greater than maximum")

    async with rig(tmp_path) as engine:
        monkeypatch.setattr("pitstop.transports.client.pidfd", odd)
        with raw(engine) as rogue:
            assert "signed integer" in await refused(rogue, encode(Hello(PROTOCOL, "trainer", 1, pid_space())))
        monkeypatch.undo()
        assert engine.link.violations == 1
        trainer = await Publisher.connect_async(engine.link.address, timeout=2.0)
        await asyncio.to_thread(trainer.close)


async def test_an_error_that_cannot_be_encoded_as_it_is_still_travels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A test's process could not send its captured log to the one that reports, for the same reason.
    caplog.set_level("ERROR", "pitstop.transports.control")

    def no(sending: object) -> None:
        raise OfferRejected("no file \udcff here", tensor="\udcff", count=1 << 80)

    async with rig(tmp_path) as engine, connected(engine) as trainer:
        engine.link._on_offer = no
        with pytest.raises(OfferRejected, match=r"no file . here"):
            await settled(trainer.publish(weights(1), weight_version=1), 5)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"what": {"x" * 2000: torch.zeros(1)}}, OfferRejected, "xxx.*2000 characters"),
        ({"what": {"deep": torch.zeros([1] * 33)}}, OfferRejected, "deep has 33 dimensions"),
        ({"headers": {"traceparent": 5}}, InvalidRequest, "traceparent"),
        ({"headers": {"long": "x" * 70_000}}, InvalidRequest, "long"),
        ({"headers": {str(n): "" for n in range(65)}}, InvalidRequest, "65 headers"),
        ({"deadlines": {"receive": float("inf")}}, UnsupportedPolicy, "receive"),
        ({"deadlines": {"receive": float("nan")}}, UnsupportedPolicy, "receive"),
        ({"deadlines": {"receive": "soon"}}, UnsupportedPolicy, "receive"),
        ({"deadlines": {"receive_per_gib": -1e9}}, UnsupportedPolicy, "receive_per_gib"),
    ],
)
async def test_what_cannot_be_said_is_raised_by_publish_and_ends_no_other_handle(
    tmp_path: Path, options: dict[str, Any], error: type[PitstopError], why: str
) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        first = trainer.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        arguments: dict[str, Any] = {"what": weights(2), "weight_version": 2} | options
        with pytest.raises(error, match=why):
            trainer.publish(arguments.pop("what"), **arguments)
        await engine.refit(sending, [Worker()])
        assert (await settled(first)).outcome is Outcome.COMMITTED
        assert engine.link.violations == 0


async def test_an_offer_that_the_engine_cannot_read_ends_its_own_handle_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as engine, connected(engine) as trainer:
        first = trainer.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        monkeypatch.setattr("pitstop.transports.publisher.judge_offer", lambda *_: None)
        wrong = trainer.publish({"x" * 2000: torch.zeros(1)}, weight_version=2)
        with pytest.raises(ProtocolViolation, match="length <= 1024"):
            await settled(wrong, 5)
        await engine.refit(sending, [Worker()])
        assert (await settled(first)).outcome is Outcome.COMMITTED


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
async def test_a_deadline_that_is_no_time_is_refused_by_the_engine(tmp_path: Path, seconds: float) -> None:
    async with rig(tmp_path) as engine:
        with raw(engine) as client:
            client.send(encode(HELLO))
            await asyncio.to_thread(client.hear)
            offer = Propose("r", 1, (Row("a", "int8", (1,)),), deadlines={"receive": seconds})
            client.send(encode(offer))
            answer = await asyncio.to_thread(client.hear)
            assert isinstance(answer, Refuse)
            assert answer.refit_id == "r"
        assert engine.offers.empty()
