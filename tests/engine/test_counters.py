"""Counters: what is flattened, what happened between two snapshots, and what a fleet says of its drafters."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine.counters import Acceptance, Counters, Series, flatten
from pitstop.engine.drafting import DROP, ENOUGH
from pitstop.engine.errors import ReplicaDied
from pitstop.engine.lifecycle import Phase
from pitstop.engine.request import SamplingParams
from pitstop.engine.simulated import Delays
from tests.engine.sim import SimFleet, fleet, until

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

names = st.sampled_from(["a", "b|reason=stop", "c|sum", "c|count"])
counts = st.integers(0, 1 << 40).map(float)
scalars = st.dictionaries(names, counts)
growth = st.fixed_dictionaries({}, optional=dict.fromkeys(["a", "b|reason=stop", "c|sum", "c|count"], counts))


def spec(drafts: float, drafted: float, accepted: float, *each: float, incarnation: int = 1) -> Counters:
    return Counters({DRAFTS: drafts, DRAFTED: drafted, ACCEPTED: accepted, PER_POSITION: each}, incarnation)


def test_labels_tell_series_of_one_name_apart_and_a_histogram_is_its_sum_and_count() -> None:
    flat = flatten(
        [
            Series("vllm:request_success", 3, {"finished_reason": "stop"}),
            Series("vllm:request_success", 1, {"finished_reason": "length"}),
            Series("vllm:e2e", 2.5, part="sum"),
            Series("vllm:e2e", 4, part="count"),
            Series("vllm:two", 1, {"b": "y", "a": "x"}, part="count"),
            Series("vllm:running", 7, gauge=True),
            Series(PER_POSITION, 5, {"position": "1"}),
            Series(PER_POSITION, 9, {"position": "0"}),
            Series(PER_POSITION, 2, {"position": "10"}),
        ],
        3,
    )
    assert flat.values == {
        "vllm:request_success|finished_reason=stop": 3,
        "vllm:request_success|finished_reason=length": 1,
        "vllm:e2e|sum": 2.5,
        "vllm:e2e|count": 4,
        "vllm:two|a=x|b=y|count": 1,
        "vllm:running": 7,
        PER_POSITION: (9, 5, 2),
    }
    assert (flat.incarnation, flat.gauges) == (3, frozenset({"vllm:running"}))


@given(scalars, growth)
def test_what_came_since_is_what_was_added_and_nothing_that_is_absent_appears(
    before: dict[str, float], added: dict[str, float]
) -> None:
    after = {name: before.get(name, 0.0) + value for name, value in added.items()}
    assert Counters(after, 1).since(Counters(before, 1)).values == added


@given(scalars.filter(bool), scalars)
def test_an_engine_that_was_started_again_has_counted_from_zero(
    before: dict[str, float], after: dict[str, float]
) -> None:
    assert Counters(after, 2).since(Counters(before, 1)).values == after
    name = min(before)
    lower = after | {name: before[name] - 1}
    assert Counters(lower, 1).since(Counters(before, 1)).values == lower


def test_a_level_may_fall_without_meaning_a_restart_and_is_not_subtracted() -> None:
    def at(running: float, made: float) -> Counters:
        return Counters({"running": running, "made": made}, 1, frozenset({"running"}))

    assert at(2, 150).since(at(9, 100)).values == {"running": 2, "made": 50}


def test_a_vector_is_subtracted_place_by_place_and_one_of_another_length_is_a_restart() -> None:
    assert spec(9, 18, 8, 6, 2).since(spec(4, 8, 4, 3, 1)) == spec(5, 10, 4, 3, 1)
    assert spec(9, 18, 8, 6, 2).since(spec(4, 4, 3, 3)) == spec(9, 18, 8, 6, 2)


def test_acceptance_is_of_drafts_of_draft_tokens_and_of_each_place_from_one_on() -> None:
    assert spec(4, 12, 6, 4, 2, 0).acceptance() == Acceptance(4, 2.5, 0.5, {1: 1.0, 2: 0.5, 3: 0.0})
    assert spec(0, 0, 0, 0, 0).acceptance() == Acceptance(0, 1.0, 0.0)
    assert Counters({"vllm:generation_tokens": 5}).acceptance() is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50))
def test_acceptance_agrees_with_the_drafts_it_was_counted_from(accepted: list[int]) -> None:
    each = [sum(n > place for n in accepted) for place in range(5)]
    found = spec(len(accepted), 5 * len(accepted), sum(accepted), *each).acceptance()
    assert found is not None
    assert found.length == pytest.approx(1 + sum(found.per_position.values()))
    assert found.rate == pytest.approx(sum(found.per_position.values()) / 5)


async def make(engine: SimFleet, tokens: int) -> None:
    await engine.generate([1, 2], SamplingParams(max_tokens=tokens))


async def test_a_fleet_tells_the_counters_of_each_living_replica_and_of_its_incarnation() -> None:
    async with fleet(2) as engine:
        await make(engine, 7)
        before = await engine.counters()
        assert sum(_made(found) for found in before.values()) == 7
        engine.sims[0].die()
        await until(lambda: engine.phase(0).value == "dead")
        assert set(await engine.counters()) == {"replica-1"}
        await engine.restart()
        await engine.refit_to(1)
        await make(engine, 5)
        await make(engine, 6)
        after = await engine.counters()
        assert [found.incarnation for found in after.values()] == [2, 1]
        assert sum(_made(after[name].since(before[name])) for name in after) == 11


async def test_an_engine_that_died_a_moment_ago_does_not_keep_the_others_counters_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(2) as engine:

        async def gone() -> Counters:
            raise ReplicaDied("replica-0 died", replica="replica-0")

        monkeypatch.setattr(engine.sims[0], "counters", gone)
        assert set(await engine.counters()) == {"replica-1"}


def _made(found: Counters) -> float:
    value = found.values["vllm:generation_tokens"]
    assert isinstance(value, int | float)
    return value


async def test_a_refit_reports_how_drafts_fared_under_the_version_that_it_replaced() -> None:
    async with fleet(drafter=lambda version: [0.75, 0.5][version]) as engine:
        await make(engine, 8)
        first = await engine.refit_to(1)
        await make(engine, 4)
        second = await engine.refit_to(2)
        found = [report.replicas["replica-0"].acceptance for report in (first, second)]
        assert found == [Acceptance(8, 1.75, 0.75, {1: 0.75}), Acceptance(4, 1.5, 0.5, {1: 0.5})]
        assert [value for name, value in engine.log.counts if name == "rl.drafter.acceptance"] == [0.75, 0.5]


async def test_without_a_drafter_nothing_is_said_of_drafts() -> None:
    async with fleet() as engine:
        await make(engine, 2 * ENOUGH)
        report = await engine.refit_to(1)
        assert report.replicas["replica-0"].acceptance is None
        assert [name for name, _ in engine.log.counts if "drafter" in name] == []


def drops(engine: SimFleet) -> int:
    return [name for name, _ in engine.log.counts].count("rl.drafter.drops")


async def test_b41_a_drafter_that_loses_a_little_with_each_version_is_told_of_once_and_again_when_it_falls_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No single step loses a quarter: against the version before, this would never show."""
    rates = [0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4]
    assert all(after > before * (1 - DROP) for before, after in pairwise(rates))
    told = []
    async with fleet(drafter=lambda version: rates[version]) as engine:
        with caplog.at_level(logging.WARNING, "pitstop.engine"):
            for version in range(len(rates)):
                if version:
                    await engine.refit_to(version)
                await make(engine, 2 * ENOUGH)
                await engine.replicas[0].drafting.look()
                told.append(drops(engine))
    assert told == [0, 0, 0, 1, 1, 1, 1, 2]
    assert "under version 3 60 % of its drafter's tokens are accepted, after 90 % at best" in caplog.text


async def test_too_few_drafts_are_no_reason_for_an_alarm() -> None:
    async with fleet(drafter=lambda version: [0.9, 0.1][version]) as engine:
        await make(engine, 2 * ENOUGH)
        await engine.refit_to(1)
        await make(engine, ENOUGH - 1)
        await engine.refit_to(2)
        assert drops(engine) == 0


async def test_a_look_that_a_refit_overtakes_ends_and_judges_neither_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(drafter=lambda version: [0.9, 0.1][version], delays=Delays(call=0.05)) as engine:
        await make(engine, 2 * ENOUGH)
        counters, late = engine.sims[0].counters, asyncio.Event()

        async def slow() -> Counters:
            await late.wait()
            return await counters()

        monkeypatch.setattr(engine.sims[0], "counters", slow)
        look = asyncio.create_task(engine.replicas[0].drafting.look())
        await asyncio.sleep(0.01)
        monkeypatch.setattr(engine.sims[0], "counters", counters)
        refit = engine.refit_to(1)
        await engine.replicas[0].reached(frozenset({Phase.RECEIVING}))
        late.set()
        assert await look is None
        await refit
        await make(engine, 2 * ENOUGH)
        await engine.replicas[0].drafting.look()
        assert drops(engine) == 1


async def test_an_engine_whose_counters_fail_serves_and_takes_refits() -> None:
    async with fleet(drafter=lambda _: 0.5) as engine:
        await make(engine, 4)
        engine.sims[0].script.faults["counters"].append("raise")
        report = await engine.refit_to(1)
        assert report.replicas["replica-0"].committed
        assert report.replicas["replica-0"].acceptance is None
        await make(engine, 4)
