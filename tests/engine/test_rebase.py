"""A trainer that starts its count anew: accepted only when it says so, and nothing after that counts backwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine.errors import StaleVersion
from pitstop.engine.ledger import Ledger, Place
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import Outcome, RefitOptions
from pitstop.engine.request import RequestLife, SamplingParams
from pitstop.engine.simulated import Delays
from tests.engine.sim import fleet

FIVE = SamplingParams(max_tokens=5)
REBASE = RefitOptions(rebase=True)


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1))
def test_places_grow_with_every_version_that_is_accepted(offers: list[tuple[int, bool]]) -> None:
    places: list[Place] = []
    for version, rebase in offers:
        if not places:
            places.append(Place.first(version))
        elif rebase:
            places.append(places[-1].rebased(version))
        elif version > places[-1].weight_version:
            places.append(places[-1].later(version))
    numbers = [place.number for place in places]
    assert numbers == sorted(set(numbers))


def test_between_rebases_places_are_as_far_apart_as_versions() -> None:
    seven = Place.first(57).rebased(1).later(7)
    assert seven == Place(64, 7)
    assert seven.later(1) == Place.first(57).rebased(1)


def test_the_ledger_knows_the_newest_and_the_oldest_by_place_and_numbers_every_commit() -> None:
    ledger = Ledger()
    for replica in ("a", "b"):
        ledger.commit(replica, ledger.born(replica), 57)
    ledger.commit("a", 1, 1, Place.first(57).rebased(1))
    assert (ledger.newest, ledger.oldest) == (Place(58, 1), 57)
    ledger.revoke("a")
    assert ledger.newest == Place(58, 1)
    commits = [ledger.commit("b", 1, 57) for _ in range(3)]
    assert len({commit.number for commit in commits}) == 3


def test_the_same_version_of_two_counts_makes_two_spans() -> None:
    life = RequestLife("r")
    life.accepted(1, 1)
    life.swapped(3, 1, 2)
    life.took(5)
    assert life.spans == ((1, 0, 3), (1, 3, 5))
    assert life.oldest == 1


async def test_without_rebase_a_lower_version_is_refused_and_the_option_is_named() -> None:
    async with fleet(weight_version=57) as engine:
        for stale in (1, 57):
            with pytest.raises(StaleVersion, match="rebase=True"):
                await engine.refit_to(stale)
        assert engine.weight_version == 57


async def test_after_a_rebase_later_versions_are_counted_from_it() -> None:
    async with fleet(2, weight_version=57) as engine:
        report = await engine.refit_to(1, REBASE)
        assert report.outcome is Outcome.COMMITTED
        assert len(report.replicas) == 2
        assert engine.weight_version == 1
        assert (await engine.refit_to(2)).outcome is Outcome.COMMITTED
        with pytest.raises(StaleVersion):
            await engine.refit_to(1)
        assert (await engine.generate([1], FIVE)).spans == ((2, 0, 5),)


async def test_a_version_of_an_earlier_count_may_come_again_with_other_content() -> None:
    async with fleet(weight_version=0) as engine:
        await engine.refit_to(1)
        assert (await engine.refit_to(1, REBASE)).outcome is Outcome.COMMITTED


async def test_staleness_is_never_negative_and_old_samples_are_old() -> None:
    async with fleet(weight_version=57) as engine:
        old = await engine.generate([1], FIVE)
        assert engine.staleness(old) == 0
        await engine.refit_to(1, REBASE)
        assert engine.staleness(old) == 1
        await engine.refit_to(3)
        new = await engine.generate([1], FIVE)
        assert (engine.staleness(old), engine.staleness(new)) == (3, 0)


async def test_a_stream_that_lives_through_a_rebase_counts_from_its_oldest_token() -> None:
    async with fleet(weight_version=57, delays=Delays(step=0.002)) as engine:
        stream = engine.stream([5], SamplingParams(max_tokens=60))
        first = await anext(stream)
        await engine.refit_to(1, REBASE)
        versions = [first.weight_version] + [chunk.weight_version async for chunk in stream]
        assert versions == sorted(versions, reverse=True)
        assert {57, 1} == set(versions)
    counted = [value for name, value in engine.log.counts if name == "rl.staleness"]
    assert counted == [1]


async def test_salts_never_repeat() -> None:
    async with fleet(weight_version=1, delays=Delays(step=0.02)) as engine:
        salts = []
        for version in (None, 2, 1, 2):
            if version is not None:
                await engine.refit_to(version, RefitOptions(policy="abort", rebase=version == 1))
            stream = engine.stream([1], SamplingParams(max_tokens=50))
            await anext(stream)
            salts += [leg.request.cache_salt for leg in engine.sims[0].legs.values()]
            await stream.aclose()
        assert len(salts) == len(set(salts)) == 4


async def test_a_replica_that_missed_a_rebase_takes_it_later_and_recovers_to_it() -> None:
    async with fleet(2, weight_version=57) as engine:
        engine.sims[1].script.plan("apply", "raise")
        assert (await engine.refit_to(1, REBASE)).outcome is Outcome.PARTIAL
        assert engine.phase(1) is Phase.QUARANTINED
        report = await engine.recover()
        assert report is not None
        assert list(report.replicas) == ["replica-1"]
        assert [r.weight_version for r in engine.replicas] == [1, 1]
        assert await engine.recover() is None


async def test_a_rebase_that_fails_changes_nothing_about_the_count() -> None:
    async with fleet(weight_version=57) as engine:
        engine.transport.script.plan("land", "raise")
        with pytest.raises(Exception, match="scripted"):
            await engine.refit_to(1, REBASE)
        with pytest.raises(StaleVersion, match="rebase=True"):
            await engine.refit_to(2)
        assert (await engine.refit_to(58)).outcome is Outcome.COMMITTED


async def test_the_next_version_of_a_rebase_on_its_way_takes_its_place_and_its_count() -> None:
    async with fleet(weight_version=57) as engine:
        first, second = engine.refit_to(1, REBASE), engine.refit_to(2)
        assert (await second).outcome is Outcome.COMMITTED
        assert (await first).outcome in (Outcome.SUPERSEDED, Outcome.COMMITTED)
        assert engine.weight_version == 2
