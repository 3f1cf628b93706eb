"""A request inside an engine: it ends once, says what it made, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.errors import InvalidRequest
from pitstop.engine.request import SamplingParams
from pitstop.engine.vllm_backend import TokenizerRenderer
from tests.checkpoints import BOS, EOS, VOCAB, tensors
from tests.conftest import Checkpoint
from tests.vllm.conftest import Garage
from tests.vllm.harness import GREEDY, PROMPT, Replica, drain, request, until


def insides(live: Replica) -> tuple[int, int, int]:
    """Count what vLLM's frontend and Pitstop still know of requests, and what is on its way into the engine."""
    life = live.backend._life
    assert life is not None
    return len(life.llm.output_processor.request_states), len(life._legs), len(life._entering)


def count_aborts(live: Replica) -> list[str]:
    """Return a list that grows by every request id that the engine is told to abort."""
    life = live.backend._life
    assert life is not None
    aborted: list[str] = []
    core = life.llm.engine_core
    tell = core.abort_requests_async

    async def counted(ids: Sequence[str]) -> None:
        aborted.extend(ids)
        await tell(ids)

    core.abort_requests_async = counted
    return aborted


async def test_deltas_add_up_to_what_one_final_piece_says(garage: Garage) -> None:
    live = await garage.start()
    whole = await live.run(request(deltas=False, text=True))
    parts = await live.run(request(salt="again", text=True))
    assert parts[:3] == whole[:3]
    assert len(whole.token_ids) == len(whole.logprobs) == 24
    assert all(logprob <= 0 for logprob in whole.logprobs)
    assert whole.last.finish_reason == "length"
    bare = await live.run(request(params=replace(GREEDY, logprobs=False)))
    assert (bare.token_ids, bare.logprobs, bare.text) == (whole.token_ids, [], "")


async def test_sampling_is_neutral_and_repeatable_by_seed(garage: Garage) -> None:
    live = await garage.start()
    wild = SamplingParams(seed=1, ignore_eos=True)
    first, again = await live.run(params=wild), await live.run(params=wild, salt="again")
    other = await live.run(params=replace(wild, seed=2), salt="other")
    assert first[:2] == again[:2]
    assert first.token_ids != other.token_ids
    # The checkpoint's generation_config asks for the 5 likeliest tokens, at a low temperature.
    many = await asyncio.gather(*(live.run(max_tokens=1, params=replace(wild, seed=n)) for n in range(60)))
    assert len({made.token_ids[0] for made in many}) > 5


async def test_end_tokens_that_only_the_generation_config_names_end_a_request(
    garage: Garage, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = await (await garage.start()).run()
    folder = shutil.copytree(checkpoint(), tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, whole.token_ids[2]]}))
    live = await garage.start(model=folder)
    made = await live.run(params=replace(GREEDY, ignore_eos=False))
    assert (made.token_ids, made.last.finish_reason) == (whole.token_ids[:3], "stop")


async def test_logprobs_are_of_the_distribution_that_was_sampled(garage: Garage) -> None:
    live = await garage.start()
    (plain,) = (await live.run(max_tokens=1)).logprobs
    (sure,) = (await live.run(max_tokens=1, params=replace(GREEDY, temperature=0.01, seed=0))).logprobs
    assert plain < -0.01 < sure


async def test_an_abort_is_told_once_and_yields_everything_made(garage: Garage) -> None:
    live = await garage.start()
    whole = await live.run(max_tokens=200)
    aborted = count_aborts(live)
    for deltas in (True, False):
        leg = await live.backend.submit(request(max_tokens=200, salt=f"{deltas}", deltas=deltas))
        clock = await live.backend.submit(request(max_tokens=200, salt="clock"))
        await until(clock, 6)
        clock.abort()
        leg.abort()
        leg.abort()
        made = await drain(leg)
        assert made.last.finish_reason == "abort"
        assert 0 < len(made.token_ids) == len(made.logprobs) < 200
        assert made[:2] == (whole.token_ids[: len(made.token_ids)], whole.logprobs[: len(made.token_ids)])
        await drain(clock)
    await live.run(max_tokens=1)
    assert len(aborted) == len(set(aborted)) == 4
    assert insides(live) == (0, 0, 0)


async def test_an_abort_after_the_end_changes_nothing(garage: Garage) -> None:
    live = await garage.start()
    leg = await live.backend.submit(request(max_tokens=3, deltas=False))
    await live.run(max_tokens=8)
    aborted = count_aborts(live)
    leg.abort()
    assert (await drain(leg)).last.finish_reason == "length"
    assert aborted == []


async def test_a_storm_of_cancellations_leaves_nothing_behind(garage: Garage) -> None:
    live = await garage.start()
    aborted = count_aborts(live)

    async def consume(n: int) -> None:
        leg = await live.backend.submit(request((*PROMPT, n), 400))
        try:
            while (await leg.next()).finish_reason is None:
                pass
        finally:
            leg.abort()

    tasks = [asyncio.create_task(consume(n)) for n in range(200)]
    for n, task in enumerate(tasks):
        # Some before they run at all, some in the add call, some before and after the first token.
        if n % 4:
            await asyncio.sleep(0)
        if n % 8 == 7:
            await live.backend.reset_cache()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await live.run(max_tokens=1)
    assert insides(live) == (0, 0, 0)
    assert len(aborted) == len(set(aborted))
    assert await live.backend.reset_cache() is True


async def test_a_cancelled_add_call_is_undone_when_it_completes(garage: Garage) -> None:
    live = await garage.start()
    life = live.backend._life
    assert life is not None
    aborted = count_aborts(live)
    core, reached, go_on = life.llm.engine_core, asyncio.Event(), asyncio.Event()
    add = core.add_request_async

    async def stuck(asked: Any) -> None:
        reached.set()
        await go_on.wait()
        await add(asked)

    core.add_request_async = stuck
    submitting = asyncio.create_task(live.backend.submit(request(max_tokens=400)))
    await reached.wait()
    submitting.cancel()
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert insides(live) == (1, 0, 1)
    core.add_request_async = add
    go_on.set()
    await live.run(max_tokens=1)
    assert insides(live)[0] == 0
    assert len(aborted) == 1
    assert await live.backend.reset_cache() is True


async def test_a_result_that_comes_with_the_cancellation_is_not_lost(garage: Garage) -> None:
    live = await garage.start()
    for turns in range(8):
        submitting = asyncio.create_task(live.backend.submit(request(max_tokens=400)))
        for _ in range(turns):
            await asyncio.sleep(0)
        submitting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await submitting).abort()
    await live.run(max_tokens=1)
    assert insides(live)[0] == 0
    assert await live.backend.reset_cache() is True


async def test_a_name_in_use_is_refused_and_free_again_afterwards(garage: Garage) -> None:
    live = await garage.start()
    whole = await live.run(max_tokens=100)
    first = request(max_tokens=100, request_id="twin", salt="1")
    leg, second = await asyncio.gather(live.backend.submit(first), live.backend.submit(first), return_exceptions=True)
    assert not isinstance(leg, BaseException)
    assert isinstance(second, InvalidRequest)
    assert "twin" in str(second)
    await until(leg, 3)
    leg.abort()
    # The aborted one has not been read to its end yet.
    again = await live.run(request(max_tokens=100, request_id="twin", salt="2"))
    assert again[:2] == whole[:2]
    assert (await drain(leg)).last.finish_reason == "abort"
    assert (await live.run(request(max_tokens=100, request_id="twin", salt="3")))[:2] == whole[:2]
    assert insides(live) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": range(600)}, "512"),
        ({"prompt": ()}, "prompt"),
        ({"prompt": (VOCAB + 5,)}, "vocab"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"params": replace(GREEDY, min_tokens=50)}, "min_tokens"),
    ],
)
async def test_what_cannot_run_is_refused_by_itself(garage: Garage, changed: dict[str, Any], said: str) -> None:
    live = await garage.start()
    whole = await live.run()
    good = [live.run(salt=f"{n}") for n in range(8)]
    results = await asyncio.gather(live.run(**changed), *good, return_exceptions=True)
    assert isinstance(results[0], InvalidRequest)
    assert said in str(results[0])
    assert [made[:2] for made in results[1:] if not isinstance(made, BaseException)] == [whole[:2]] * 8


async def test_ids_are_taken_as_they_are_and_cut_anywhere(garage: Garage, checkpoint: Checkpoint) -> None:
    live = await garage.start()
    words = TokenizerRenderer(str(checkpoint()))
    one, two = words.encode("hello")[1:], [words.encode("he")[1], words.encode("llo")[1]]
    assert len(one) == 1
    assert words.decode(one) == words.decode(two)
    assert (await live.run(prompt=(BOS, *one))).token_ids != (await live.run(prompt=(BOS, *two))).token_ids
    start = (BOS, *two, *words.encode("é")[1:2])
    whole = await live.run(prompt=start)
    for cut in (1, 7, 20):
        rest = await live.run(prompt=(*start, *whole.token_ids[:cut]), max_tokens=24 - cut)
        assert [*whole.token_ids[:cut], *rest.token_ids] == whole.token_ids


REPETITIVE = (BOS, 80)


async def letters(live: Replica) -> str:
    """Give the engine a model that writes lower-case letters only, and return what it writes."""
    content = tensors("llama", 1)
    content["lm_head.weight"][: ord("a") - 33] = 0
    content["lm_head.weight"][ord("z") - 32 :] = 0
    await live.refit(content)
    made = await live.run(request(REPETITIVE, 64, text=True))
    assert made.text.isalpha()
    assert len(made.text) == 64
    return made.text


@pytest.mark.parametrize("drafts", [0, 4], ids=["token by token", "several tokens a step"])
async def test_ids_end_with_the_token_that_completed_a_stop_string(garage: Garage, drafts: int) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    live = await garage.start(speculative_config=lookup if drafts else None)
    text = await letters(live)
    words = TokenizerRenderer(live.backend._settings.model)
    # In a run of one letter the drafts are right, and a step makes tokens past the end of the match.
    run = re.search(r"(.)\1{9,}", text)
    assert run is not None
    stops = [text[:1], text[30:33], text[40:42], *(run[0][:length] for length in range(4, 11))]
    for stop, include, deltas in product(stops, (True, False), (True, False)):
        asked = replace(GREEDY, stop=(stop,), include_stop=include)
        made = await live.run(request(REPETITIVE, 64, asked, text=True, deltas=deltas))
        ended = text.index(stop) + len(stop)
        assert words.decode(made.token_ids) == text[:ended]
        assert made.text == text[: ended if include else ended - len(stop)]
        assert len(made.logprobs) == len(made.token_ids)
        assert (made.last.finish_reason, made.last.stop_reason) == ("stop", stop)
    assert insides(live) == (0, 0, 0)


async def test_stop_ids_and_eos_end_a_request(garage: Garage) -> None:
    live = await garage.start()
    whole = await live.run()
    third = whole.token_ids[2]
    made = await live.run(params=replace(GREEDY, stop_token_ids=(third,)))
    assert made.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]
    assert (made.last.finish_reason, made.last.stop_reason) == ("stop", third)
    content = tensors("llama", 0)
    content["lm_head.weight"] = content["lm_head.weight"] * 0
    content["lm_head.weight"][EOS] = 1.0
    await live.refit(content)
    ends = await asyncio.gather(*(live.run(params=replace(GREEDY, ignore_eos=False), salt=f"{n}") for n in range(2)))
    assert {made.last.finish_reason for made in ends} <= {"stop", "length"}


async def test_a_leg_that_is_forgotten_can_be_aborted_by_its_finalizer(garage: Garage) -> None:
    live = await garage.start()
    leg = await live.backend.submit(request(max_tokens=400))
    await until(leg, 2)
    leg.abort()
    del leg
    gc.collect()
    await live.run(max_tokens=1)
    assert insides(live)[0] == 0
