"""Streams of a real engine: left in every way, cut by a death, shared by a fixture."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pitstop.engine import Phase, RolloutEngine, SamplingParams, errors
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class _Aborts:
    """Counts what the engine is told to abort, by request."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.seen: list[str] = []
        llm = engine.replicas[0].backend._life.llm  # type: ignore[attr-defined]
        tell = llm.engine_core.abort_requests_async

        async def told(ids: list[str]) -> Any:
            self.seen += ids
            return await tell(ids)

        llm.engine_core.abort_requests_async = told
        self._llm = llm

    @property
    def unfinished(self) -> int:
        return int(self._llm.output_processor.get_num_unfinished_requests())


async def test_two_hundred_streams_left_in_four_ways_are_each_aborted_exactly_once(launch: Launch) -> None:
    async with launch(max_num_seqs=64) as engine:
        await engine.verify()  # or the first reading of the weights would end in the middle
        before = asyncio.all_tasks()
        aborts = _Aborts(engine)

        async def before_the_first_token(n: int) -> None:
            async for _ in engine.stream([n % 200, 1], LONG):
                raise AssertionError

        async def while_waiting(n: int) -> None:
            async for _ in engine.generate_async([[n % 200, 2]], LONG):
                raise AssertionError

        async def by_break(n: int) -> None:
            async for _ in engine.stream([n % 200, 3], LONG):
                await asyncio.sleep(0.001)
                break

        async def dropped(n: int) -> None:
            stream = engine.stream([n % 200, 4], LONG)
            await anext(stream)

        tasks = [asyncio.create_task(way(n)) for n in range(50) for way in (by_break, dropped, while_waiting)]
        await asyncio.sleep(0.2)
        early = [asyncio.create_task(before_the_first_token(n)) for n in range(50)]
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        for task in (*early, *tasks[2::3]):
            task.cancel()
        await asyncio.gather(*tasks, *early, return_exceptions=True)
        gc.collect()
        async with asyncio.timeout(2):
            await engine.replicas[0].backend.drained()
        assert not aborts.unfinished
        assert not engine.replicas[0].flights
        assert len(aborts.seen) == len(set(aborts.seen))
        assert len(aborts.seen) >= 150
        assert len((await engine.generate([5], SHORT)).token_ids) == 4
        assert asyncio.all_tasks() == before


async def test_kill_of_one_engine_ends_its_streams_with_the_typed_error_and_others_serve(launch: Launch) -> None:
    async with launch(replicas=2) as engine:
        streams = [engine.stream([97 + n], LONG) for n in range(8)]
        heads = [await anext(stream) for stream in streams]
        pid = engine.replicas[0].booted.pid  # type: ignore[union-attr]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ends: list[str] = []

        async def rest(stream: Any) -> None:
            try:
                async for _ in stream:
                    pass
            except errors.ReplicaDied:
                ends.append("died")
            else:
                ends.append(str(stream.finish_reason))

        async with asyncio.timeout(5):
            await asyncio.gather(*(rest(stream) for stream in streams))
        assert sorted(ends) == ["died"] * 4 + ["length"] * 4
        assert len(heads) == 8
        assert [r.phase for r in engine.replicas] == [Phase.DEAD, Phase.SERVING]
        assert (await engine.generate([1], SHORT)).replica == "replica-1"


async def test_a_dead_replica_is_restarted_and_serves_after_a_refit(launch: Launch, checkpoint: Checkpoint) -> None:
    async with launch() as engine:
        wanted = await engine.generate([97], SHORT)
        task = asyncio.create_task(engine.generate([98], LONG))
        await asyncio.sleep(0.1)
        os.kill(engine.replicas[0].booted.pid, signal.SIGKILL)  # type: ignore[union-attr, arg-type]
        with pytest.raises(errors.ReplicaDied):
            await task
        with pytest.raises(errors.NotServing, match="a restart and a refit"):
            await engine.generate([97], SHORT)
        await engine.restart()
        with pytest.raises(errors.NotServing, match="a full refit is missing"):
            await engine.generate([97], SHORT)
        await engine.refit(checkpoint("llama", 0), weight_version=1)
        again = await engine.generate([97], SHORT)
        assert (again.token_ids, again.spans) == (wanted.token_ids, ((1, 0, 4),))


async def test_a_killed_replica_recovers_to_the_fleet_s_version_without_its_trainer(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    async with launch(replicas=2) as engine:
        await engine.refit(checkpoint("llama", 1), weight_version=5)
        wanted = await engine.generate([97], SHORT)
        os.kill(engine.replicas[1].booted.pid, signal.SIGKILL)  # type: ignore[union-attr, arg-type]
        await engine.replicas[1].reached(frozenset({Phase.DEAD}))
        report = await engine.recover()
        assert report is not None
        assert list(report.replicas) == ["replica-1"]
        done = [c async for _, c in engine.generate_async([[97], [97]], SHORT)]
        assert {c.replica for c in done} == {"replica-0", "replica-1"}
        assert {tuple(c.token_ids) for c in done} == {tuple(wanted.token_ids)}
        assert {c.spans for c in done} == {((5, 0, 4),)}


async def test_bad_prompts_fail_alone_and_the_engine_serves_on(launch: Launch) -> None:
    async with launch(max_model_len=64) as engine:
        prompts: list[Any] = [[1] * 63, [1] * 64, [1] * 65, [1] * 1000, [], [320], "text"]
        prompts += [[97 + n] for n in range(8)]
        got = {n: completion async for n, completion in engine.generate_async(prompts, SHORT)}
        assert [(got[n].finish_reason, len(got[n].token_ids)) for n in (0, 1)] == [("length", 1), ("length", 0)]
        assert all(isinstance(got[n].error, errors.InvalidRequest) for n in (2, 3, 4, 5))
        assert all(len(got[n].token_ids) == 4 for n in range(6, 15))
        assert (await engine.generate([1], SamplingParams(max_tokens=0))).finish_reason == "length"


async def test_text_is_derived_and_ids_are_carried_through_turns(launch: Launch) -> None:
    async with launch() as engine:
        first = await engine.generate("hello", SHORT)
        second = await engine.generate([*first.prompt_token_ids, *first.token_ids, 97], SHORT)
        assert list(second.prompt_token_ids) == [*first.prompt_token_ids, *first.token_ids, 97]
        chunks = [chunk async for chunk in engine.stream("hello", SHORT)]
        assert [t for c in chunks for t in c.token_ids] == list(first.token_ids)
        assert first.logprobs == pytest.approx([x for c in chunks for x in c.logprobs])


async def test_a_stop_string_ends_text_and_ids_by_one_rule(launch: Launch) -> None:
    async with launch() as engine:
        plain = await engine.generate([97, 98], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
        stop = plain.text[len(plain.text) // 2 :][:3]
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=stop)
        done = await engine.generate([97, 98], params)
        chunks = [chunk async for chunk in engine.stream([97, 98], params)]
        assert done.finish_reason == "stop"
        assert done.stop_reason == stop
        assert stop not in done.text
        assert len(done.token_ids) == len(done.logprobs)
        assert list(done.token_ids) == list(plain.token_ids[: len(done.token_ids)])
        assert [t for c in chunks for t in c.token_ids] == list(done.token_ids)
        assert "".join(c.text for c in chunks) == done.text


async def test_a_seed_repeats_a_request(launch: Launch) -> None:
    async with launch() as engine:
        params = SamplingParams(max_tokens=16, seed=7, ignore_eos=True)
        first, second = [await engine.generate([97], params) for _ in range(2)]
        assert first.token_ids == second.token_ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(launch: Launch) -> AsyncIterator[RolloutEngine]:
    async with launch() as engine:
        yield engine


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_of_a_module_fixture_serves_its_first_test(shared: RolloutEngine) -> None:
    assert len((await shared.generate([97], SHORT)).token_ids) == 4


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_of_a_module_fixture_serves_its_second_test(shared: RolloutEngine) -> None:
    # How many chunks they come in is the engine's to say.
    assert sum([len(c.token_ids) async for c in shared.stream([97], SHORT)]) == 4
