"""What is damaged, swapped, cut short, said twice, out of order or about something else is found, named, and clean.

A trainer that lies talks to a whole engine, whose receivers are processes. Whatever it says: the replicas go on with
the version that they have, no token is of any other, and an honest trainer's next version commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitstop.engine import Outcome, Phase, SamplingParams
from pitstop.engine.refit import RefitReport
from pitstop.transports import Publisher
from pitstop.transports.codec import encode, words
from pitstop.transports.memory_link import memory_sending
from pitstop.transports.messages import Accept, Fault, Faulted, FromClient, Propose, Refuse, Row, Seal, Sent, Settled
from pitstop.transports.packing import Slot
from pitstop.transports.reports import accepted
from pitstop.transports.segment import Mapping
from pitstop.transports.sources import TensorSource
from tests.transports.children import Worker
from tests.transports.pits import Pits, Viewer
from tests.transports.rig import rig
from tests.transports.test_link import HELLO, Raw
from tests.transports.test_publisher import settled, shas
from tests.transports.weights import weights

NAMES = list(weights(0))
DEADLINES = {"receive": 2.0, "silence": 1.5, "control": 2.5, "finalize": 2.0}


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@dataclass
class Sheet:
    """What a trainer has written, before it says so."""

    refit_id: str
    into: Mapping
    slots: list[Slot]
    digests: list[int]

    def at(self, name: str) -> Any:
        """The bytes of a tensor, to be written to."""
        n = NAMES.index(name)
        nbytes = weights(0)[name].nbytes
        return self.into.tensor("uint8", (nbytes,), self.slots[n].offset)

    def sent(self) -> Sent:
        return Sent(self.refit_id, words(self.digests))


class Liar(Raw):
    """A trainer by hand."""

    def say(self, message: FromClient) -> None:
        self.send(encode(message))

    async def heard(self, kind: type[Any]) -> Any:
        while not isinstance(message := await asyncio.to_thread(self.hear), kind):
            pass
        return message

    def offer(self, version: int, refit_id: str = "lie", **changed: Any) -> None:
        rows = tuple(
            Row(name, str(t.dtype).removeprefix("torch."), changed.get(name, tuple(t.shape)))  # type: ignore[arg-type]
            for name, t in weights(version).items()
        )
        self.say(Propose(refit_id, version, rows, deadlines=DEADLINES))

    async def wrote(self, version: int) -> Sheet:
        message: Accept = await self.heard(Accept)
        slots = list(accepted(message))
        into = Mapping(message.buffer, message.nbytes, "write")
        digests = np.zeros(len(slots), np.uint64)
        for _ in TensorSource(weights(version).items()).pack(slots, into, digests):
            pass
        return Sheet(message.refit_id, into, slots, digests.tolist())


@asynccontextmanager
async def lied_to(*, dies: bool = False) -> AsyncIterator[tuple[Pits, Liar]]:
    """An engine under load, which is as well afterwards as before; `dies`: its first replica does meanwhile."""
    async with Pits() as engine:
        viewers = [Viewer(engine, n) for n in range(2)]
        liar = Liar(engine.address)
        try:
            liar.say(HELLO)
            yield engine, liar
        finally:
            liar.close()
        async with await Publisher.connect_async(engine.address) as honest:
            report = await settled(honest.publish(weights(7), weight_version=7, deadlines=DEADLINES))
        assert report.outcome is Outcome.COMMITTED
        assert [sim.content for sim in engine.sims] == [shas(weights(7))] * 2
        for viewer in viewers:
            await viewer.leave()  # looks at every token
            assert viewer.error is None or (dies and viewer.error.slug == "replica_died")


async def nothing_changed(engine: Pits, report: RefitReport, version: int = 0) -> None:
    assert report.outcome is Outcome.FAILED
    assert [replica.phase for replica in engine.replicas] == [Phase.SERVING] * 2
    assert [replica.weight_version for replica in engine.replicas] == [version] * 2
    done = await asyncio.gather(*(engine.generate([n], SamplingParams(max_tokens=3)) for n in range(4)))
    assert {completion.spans for completion in done} == {((version, 0, 3),)}


def flipped(sheet: Sheet) -> None:
    sheet.at("layer.weight")[77] ^= 1


def swapped(sheet: Sheet) -> None:
    one, other = sheet.at("embed.weight")[:512], sheet.at("layer.weight")[:512]
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def swapped_digests(sheet: Sheet) -> None:
    sheet.digests[0], sheet.digests[1] = sheet.digests[1], sheet.digests[0]


def moved(sheet: Sheet) -> None:
    tensor = sheet.at("router.bias")
    tensor.copy_(tensor.roll(8))


def cut_short(sheet: Sheet) -> None:
    sheet.at("codes")[500:] = 0


def stale(sheet: Sheet) -> None:
    import torch

    old = weights(0)["embed.weight"]
    sheet.at("embed.weight").copy_(old.view(torch.uint8).flatten())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flipped, {"layer.weight"}),
        (swapped, {"embed.weight", "layer.weight"}),
        (swapped_digests, {"embed.weight", "layer.weight"}),
        (moved, {"router.bias"}),
        (cut_short, {"codes"}),
        (stale, {"embed.weight"}),
    ],
)
async def test_content_that_is_not_what_was_sent_is_named_and_goes_nowhere(
    damage: Callable[[Sheet], None], named: set[str]
) -> None:
    async with lied_to() as (engine, liar):
        liar.offer(1)
        sheet = await liar.wrote(1)
        damage(sheet)
        liar.say(sheet.sent())
        report, _ = await engine.over(1)
        for part in report.replicas.values():
            assert part.error is not None
            assert part.error.slug == "digest_mismatch"
            assert part.error.fields["count"] == len(named)
            assert {name for name in NAMES if name in part.error.message} == named
        assert (await liar.heard(Settled)).error.slug == "digest_mismatch"
        await nothing_changed(engine, report)


@pytest.mark.parametrize("count", [-1, 1])
async def test_digests_for_more_or_fewer_tensors_are_a_violation(count: int) -> None:
    async with lied_to() as (engine, liar):
        liar.offer(1)
        sheet = await liar.wrote(1)
        sheet.digests = sheet.digests[:-1] if count < 0 else [*sheet.digests, 1]
        liar.say(sheet.sent())
        report, _ = await engine.over(1)
        assert report.error is not None
        assert report.error.slug == "protocol_violation"
        assert f"{len(NAMES) + count} digests for {len(NAMES)}" in report.error.message
        await nothing_changed(engine, report)


async def test_what_is_said_twice_or_about_another_refit_counts_for_nothing() -> None:
    async with lied_to() as (engine, liar):
        liar.offer(1)
        sheet = await liar.wrote(1)
        liar.say(Sent("another", words(sheet.digests)))
        assert "not offered" in (await liar.heard(Refuse)).error.message
        liar.say(sheet.sent())
        wrong = Sent("lie", words([digest ^ 1 for digest in sheet.digests]))
        liar.say(wrong)
        liar.say(Faulted("lie", Fault("remote_error", "no")))
        assert (await liar.heard(Settled)).outcome == "committed"
        report, _ = await engine.over(1)
        assert report.outcome is Outcome.COMMITTED
        assert [sim.content for sim in engine.sims] == [shas(weights(1))] * 2
        # An offer that was settled cannot come again, and what it had said is no part of another one.
        liar.offer(2)
        assert "offered before" in (await liar.heard(Refuse)).error.message
        liar.say(wrong)
        liar.offer(3, "lie-3")
        liar.say((await liar.wrote(3)).sent())
        assert (await liar.heard(Settled)).outcome == "committed"


async def test_a_trailer_before_its_turn_is_refused_and_the_refit_goes_on() -> None:
    async with lied_to() as (engine, liar):
        # Until the engine has planned, nothing can have been sent.
        liar.offer(1)
        liar.say(Sent("lie", words([1] * len(NAMES))))
        assert "which is offered" in (await liar.heard(Refuse)).error.message
        liar.say((await liar.wrote(1)).sent())
        assert (await liar.heard(Settled)).outcome == "committed"
        assert [sim.content for sim in engine.sims] == [shas(weights(1))] * 2


async def test_a_version_that_is_not_newer_or_has_other_content_is_refused() -> None:
    async with lied_to(dies=True) as (engine, liar):
        liar.offer(4, "four")
        liar.say((await liar.wrote(4)).sent())
        assert (await liar.heard(Settled)).outcome == "committed"
        for version, refit_id in ((4, "again"), (2, "older")):
            liar.offer(version, refit_id)
            assert (await liar.heard(Settled)).error.slug == "stale_version"
        # One replica lost it: the same version may come for that one, but not with other content.
        engine.sims[0].die()
        await asyncio.wait_for(engine.replicas[0].reached(frozenset({Phase.DEAD})), 5)
        await engine.restart()
        liar.offer(4, "other")
        liar.say((await liar.wrote(5)).sent())
        assert "with other content" in (await liar.heard(Settled)).error.message
        assert engine.replicas[0].weight_version is None
        assert engine.replicas[1].weight_version == 4


async def test_tensors_that_are_declared_larger_than_they_are_take_no_memory() -> None:
    async with lied_to() as (engine, liar):
        liar.offer(1, codes=(1 << 40,))
        error = (await liar.heard(Settled)).error
        assert (error.slug, error.fields["tensor"]) == ("shape_mismatch", "codes")
        report, _ = await engine.over(1)
        await nothing_changed(engine, report)


async def test_a_receiver_that_hears_of_another_refit_or_twice_gives_up_and_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        for seal in (Seal("another", words([1] * len(NAMES))), Seal("own", words([1]))):
            sending = memory_sending(weights(1), weight_version=1)
            worker = Worker()
            (ticket,) = await engine.plan(sending, [worker])
            worker.receive(ticket)
            async with asyncio.timeout(10):
                while not (seated := [c for c in engine.link._clients.values() if c.seat is not None]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            own = Seal(sending.offer.refit_id, seal.digests) if seal.refit_id == "own" else seal
            seated[0].post(own)
            (over,) = await engine.ended(sending.offer.refit_id, 1)
            assert over.error is not None
            assert over.error.slug == "protocol_violation"
            assert worker.sink.bucket is None
            await engine.release(sending, [worker])
        assert (await engine.refit(memory_sending(weights(2), weight_version=2), [Worker()])).error is None
