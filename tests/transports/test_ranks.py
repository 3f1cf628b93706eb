"""Several trainer ranks at one engine: rank 0 sends, every rank hears how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pitstop.engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LocalError,
    PeerLost,
    PublishOrder,
    StaleVersion,
)
from pitstop.engine.refit import Outcome
from pitstop.transports import Publisher
from pitstop.transports.codec import encode, from_client
from pitstop.transports.messages import FromEngine, Join, Propose, Refuse, Settled
from pitstop.transports.ranks import Group
from tests.transports.children import Worker
from tests.transports.rig import Rig, rig, until
from tests.transports.test_publisher import settled
from tests.transports.weights import weights


async def ranks(engine: Rig, *numbers: int, world_size: int = 3, **options: Any) -> list[Publisher]:
    address = engine.link.address
    return [await Publisher.connect_async(address, rank=n, world_size=world_size, **options) for n in numbers]


def gathered(read: list[str], version: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights(version).items():
        read.append(name)
        yield name, tensor


async def close(*publishers: Publisher) -> None:
    for publisher in publishers:
        await publisher.aclose()


# -- the group, without a link ---------------------------------------------------------------------------------


class Member:
    def __init__(self) -> None:
        self.name = "rank 1"
        self.said: list[FromEngine] = []

    def post(self, message: FromEngine) -> bool:
        self.said.append(message)
        return True


def end(refit_id: str, version: int) -> Settled:
    return Settled(refit_id, version, "committed", "shared_memory", 1, 1, 1.0, 1.0)


@given(st.permutations(["offer", "join", "end"]))
def test_a_rank_hears_the_same_report_in_whatever_order_things_come(order: list[str]) -> None:
    group, member = Group(), Member()
    offered = False
    for what in order:
        if what == "join":
            group.joined(member, Join("mine", 7, 0))
        elif not offered:  # an end cannot come before its offer
            group.offered(Propose("r", 7, (), number=0))
            offered = True
        else:
            group.ended(end("r", 7))
    (said,) = member.said
    assert isinstance(said, Settled)
    assert (said.refit_id, said.joined, said.weight_version) == ("r", "mine", 7)


@given(st.text(max_size=64), st.integers(0, 1 << 61), st.integers(0, 1 << 61), st.floats(0, 1e6))
def test_a_join_survives_the_wire(name: str, version: int, number: int, seconds: float) -> None:
    join = Join(name or "r", version, number, seconds)
    assert from_client(encode(join)) == join


def test_a_rank_that_publishes_another_version_is_told_and_the_others_are_not() -> None:
    group, member, other = Group(), Member(), Member()
    group.joined(member, Join("mine", 8, 0))
    group.joined(other, Join("theirs", 7, 0))
    group.offered(Propose("r", 7, (), number=0))
    (said,) = member.said
    assert isinstance(said, Refuse)
    assert (said.refit_id, said.error.slug) == ("mine", "publish_order")
    assert not other.said


def test_a_rank_that_waits_for_rank_0_waits_only_so_long() -> None:
    now = 0.0
    group, member = Group(lambda: now), Member()
    group.joined(member, Join("mine", 7, 0, 5.0))
    group.joined(member, Join("next", 8, 1, 5.0))
    group.offered(Propose("r", 8, (), number=1))
    now = 6.0
    group.tick()
    (said,) = member.said
    assert isinstance(said, Refuse)
    assert (said.refit_id, said.error.slug) == ("mine", "deadline_exceeded")


def test_what_is_remembered_is_bounded() -> None:
    group, member = Group(), Member()
    for n in range(1000):
        group.offered(Propose(f"r{n}", n, (), number=n))
        group.ended(end(f"r{n}", n))
    group.joined(member, Join("old", 3, 3))
    group.joined(member, Join("new", 999, 999))
    assert [type(said) for said in member.said] == [Refuse, Settled]


def test_when_rank_0_is_gone_what_it_ended_still_counts() -> None:
    group, member = Group(), Member()
    group.offered(Propose("r", 7, (), number=0))
    group.ended(end("r", 7))
    group.joined(member, Join("waits", 8, 1))
    group.left(PeerLost("rank 0 is gone"))
    group.joined(member, Join("done", 7, 0))
    group.joined(member, Join("late", 9, 2))
    assert [type(said) for said in member.said] == [Refuse, Settled, Refuse]


# -- on the link -----------------------------------------------------------------------------------------------


async def test_every_rank_resolves_with_the_report_of_what_rank_0_sent(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        second, first, zero = await ranks(engine, 2, 1, 0)
        reports = []
        for version in (1, 2):
            read: list[str] = []
            early = second.publish(weights(version), weight_version=version)
            assert early.sent.is_set()
            leading = zero.publish(weights(version), weight_version=version)
            sending = await engine.offer()
            late = first.publish(gathered(read, version), weight_version=version)
            assert read == list(weights(version))
            await engine.refit(sending, [Worker()])
            reports = [await settled(handle) for handle in (leading, early, late)]
            assert reports[0] == reports[1] == reports[2]
            assert {h.refit_id for h in (leading, early, late)} == {leading.refit_id, early.refit_id, late.refit_id}
            assert engine.offers.empty()
        assert reports[0].outcome is Outcome.COMMITTED
        await close(zero, first, second)


async def test_every_rank_raises_what_rank_0_raises(tmp_path: Path) -> None:
    def no(_: object) -> None:
        raise StaleVersion("version 1 is not above 3")

    async with rig(tmp_path) as engine:
        zero, first = await ranks(engine, 0, 1, world_size=2)
        engine.link._on_offer = no
        for handle in [p.publish(weights(1), weight_version=1) for p in (first, zero)]:
            with pytest.raises(StaleVersion, match="not above 3"):
                await settled(handle)
        await close(zero, first)


async def test_ranks_that_get_out_of_step_are_told(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        zero, first = await ranks(engine, 0, 1, world_size=2)
        zero.publish(weights(7), weight_version=7)
        await engine.offer()
        wrong = first.publish(weights(8), weight_version=8)
        with pytest.raises(PublishOrder, match=r"version 8 .* version 7.*same order"):
            await settled(wrong)
        await close(zero, first)


async def test_ranks_are_not_left_waiting_by_a_rank_0_that_goes_or_does_not_come(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        zero, first = await ranks(engine, 0, 1, world_size=2)
        waits = first.publish(weights(1), weight_version=1)
        await asyncio.sleep(0.1)
        await zero.aclose()
        with pytest.raises(PeerLost, match="rank 0"):
            await settled(waits, 5)
        (alone,) = await ranks(engine, 1, world_size=2)
        with pytest.raises(DeadlineExceeded, match="rank 0"):
            await settled(alone.publish(weights(1), weight_version=1, deadlines={"receive": 0.3}), 5)
        await close(first, alone)


async def test_a_new_trainer_does_not_hear_of_what_the_one_before_it_sent(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        zero, _ = old = await ranks(engine, 0, 1, world_size=2)
        handle = zero.publish(weights(1), weight_version=1)
        await engine.refit(await engine.offer(), [Worker()])
        await settled(handle)
        await close(*old)
        await until(lambda: not engine.link._ranks.groups)
        (first,) = await ranks(engine, 1, world_size=2)
        joined = first.publish(weights(1), weight_version=1)
        (zero,) = await ranks(engine, 0, world_size=2)
        leading = zero.publish(weights(1), weight_version=1)
        await engine.refit(await engine.offer(), [Worker()])
        assert await settled(joined) == await settled(leading)
        assert (await settled(joined)).refit_id == leading.refit_id
        await close(zero, first)
        await until(lambda: not engine.link._ranks.groups)


async def test_two_trainers_of_several_ranks_are_kept_apart_by_their_groups(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        a = await ranks(engine, 0, 1, world_size=2, group="a")
        b = await ranks(engine, 1, 0, world_size=2, group="b")
        handles = [p.publish(weights(1), weight_version=n) for n, pair in ((1, a), (2, b)) for p in pair]
        for _ in range(2):
            await engine.refit(await engine.offer(), [Worker()])
        assert [(await settled(handle)).weight_version for handle in handles] == [1, 1, 2, 2]
        await close(*a, *b)


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"world_size": 0}, {"group": "x" * 65}])
async def test_a_rank_that_cannot_be_is_refused_where_it_is_said(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Publisher.connect(f"ipc://{tmp_path}/s", **({"rank": 0, "world_size": 2} | wrong))


async def test_a_rank_that_does_not_send_is_checked_all_the_same(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        (first,) = await ranks(engine, 1)
        with pytest.raises(LocalError):
            first.publish(weights(1), weight_version=-1)
        await first.aclose()
