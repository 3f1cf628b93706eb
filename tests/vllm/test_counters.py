"""What vLLM counts, of one engine at a time."""

from __future__ import annotations

from tests.vllm.conftest import Garage

MADE, ENDED = "vllm:generation_tokens", "vllm:request_success|finished_reason=length"
PROMPTS = "vllm:request_prompt_tokens"


async def test_each_of_two_engines_of_one_process_keeps_its_own_counters(garage: Garage) -> None:
    first, second = [await garage.start(disable_log_stats=False) for _ in range(2)]
    await first.run(max_tokens=5)
    await second.run(max_tokens=7)
    before = await first.backend.counters()
    await first.run(max_tokens=11)
    found, other = await first.backend.counters(), await second.backend.counters()
    assert (before.values[MADE], found.values[MADE], other.values[MADE]) == (5, 16, 7)
    assert (found.values[ENDED], found.values["vllm:request_success|finished_reason=stop"]) == (2, 0)
    assert (found.values[f"{PROMPTS}|count"], found.values[f"{PROMPTS}|sum"]) == (2, 42)
    since = found.since(before)
    assert (since.values[MADE], since.values[ENDED], since.values[f"{PROMPTS}|sum"]) == (11, 1, 21)
    assert "vllm:num_requests_running" in found.gauges
    assert found.acceptance() is None
    assert not [name for name in found.values if "engine=" in name or "model_name" in name or "_created" in name]


async def test_an_engine_that_does_not_count_says_so_by_having_no_counters(garage: Garage) -> None:
    live = await garage.start()
    await live.run()
    assert (await live.backend.counters()).values == {}
