"""A refit from a path, from this process and from another one, under live streams of a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pitstop.engine import Completion, Outcome, RolloutEngine, SamplingParams, errors
from tests.checkpoints import FAMILIES
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch
from tests.e2e.trainer import trainer

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(97, 117))


async def greedy(engine: RolloutEngine) -> tuple[list[int], list[float]]:
    done = await engine.generate(PROMPT, GREEDY)
    return list(done.token_ids), list(done.logprobs)


@pytest.mark.parametrize("family", ["llama", "tied", "qwen3_moe"])
async def test_after_a_refit_the_engine_equals_a_fresh_one_and_the_way_back_is_exact(
    launch: Launch, checkpoint: Checkpoint, family: str
) -> None:
    t0, t1 = checkpoint(family, 0), checkpoint(family, 1)
    async with launch(family, 1) as fresh:
        wanted = await greedy(fresh)
    async with launch(family, 0) as engine:
        before = await greedy(engine)
        assert before != wanted
        await engine.refit(t0, weight_version=1)
        assert await greedy(engine) == before
        await engine.refit(t1, weight_version=2)
        assert await greedy(engine) == wanted
        await engine.refit(t0, weight_version=3)
        assert await greedy(engine) == before
        with trainer(engine.address) as publisher:
            await publisher.connected()
            assert (await publisher.publish(t1, 4))[0] == "committed"
            assert await greedy(engine) == wanted
            assert (await publisher.publish(t0, 5, "wrapped"))[0] == "committed"
            assert await greedy(engine) == before
            assert (await publisher.publish(t1, 6, "shuffled"))[0] == "committed"
            assert await greedy(engine) == wanted
        assert engine.weight_version == 6


async def test_every_family_takes_a_version_from_a_trainer_in_this_process(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    from safetensors.torch import load_file

    for family in FAMILIES:
        async with launch(family, 1) as fresh:
            wanted = await greedy(fresh)
        async with launch(family, 0) as engine:
            handle = engine.refit(load_file(checkpoint(family, 1) / "model.safetensors"), weight_version=1)
            await handle.sent.wait()
            assert (await handle).transport == "memory"
            assert await greedy(engine) == wanted


async def test_fp32_masters_are_cast_where_the_offer_says_so(launch: Launch, checkpoint: Checkpoint) -> None:
    half = checkpoint("llama", 1, dtype="bfloat16")
    async with RolloutEngine.launch(
        checkpoint("llama", 0, dtype="bfloat16"),
        engine_args={"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20},
        start_method="fork",
    ) as engine:
        await engine.refit(half, weight_version=1)
        wanted = await greedy(engine)
        with trainer(engine.address) as publisher:
            await publisher.connected()
            slug, message, _ = await publisher.publish(half, 2, "fp32")
            assert slug == "dtype_mismatch"
            assert 'cast="inventory"' in message
            assert (await publisher.publish(half, 2, "fp32", cast="inventory"))[0] == "committed"
        assert await greedy(engine) == wanted


WRONG = {
    "missing": "missing_tensors", "renamed": "unexpected_tensors", "repeated": "repeated_tensors",
    "shape": "shape_mismatch", "dtype": "dtype_mismatch",
}  # fmt: skip


async def test_tensors_that_do_not_fit_are_named_before_anything_is_suspended(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    async with launch() as engine:
        with trainer(engine.address) as publisher:
            await publisher.connected()
            for version, (how, slug) in enumerate(WRONG.items()):
                stream = engine.stream(PROMPT, LONG)
                await anext(stream)
                said, message, fields = await publisher.publish(checkpoint("llama", 1), version + 1, how)
                assert said == slug
                assert str(fields["tensor"]).split(" ")[0] in message
                assert engine.replicas[0].phase.value == "serving"
                assert {chunk.weight_version async for chunk in stream} == {version}
                assert (await publisher.publish(checkpoint("llama", 1), version + 1))[0] == "committed"


async def _split(engine: RolloutEngine, path: Path, policy: str, *, late: bool) -> tuple[Completion, list[int]]:
    """Refit in the middle of a stream; return a completion-like view of it."""
    stream = engine.stream(PROMPT, LONG)
    chunks = [await anext(stream) for _ in range(10)]
    handle = engine.refit(path, weight_version=1, policy=policy)  # type: ignore[arg-type]
    if late:
        await handle
        await asyncio.sleep(0.05)
    chunks += [chunk async for chunk in stream]
    await handle
    versions = [v for c in chunks for v in [c.weight_version] * len(c.token_ids)]
    tokens = [t for c in chunks for t in c.token_ids]
    logprobs = [x for c in chunks for x in c.logprobs]
    assert len(tokens) == len(logprobs)
    assert [c.start for c in chunks] == [sum(len(c.token_ids) for c in chunks[:n]) for n in range(len(chunks))]
    done = Completion(
        request_id=stream.request_id, prompt_token_ids=PROMPT, token_ids=tokens, logprobs=logprobs, spans=(),
        finish_reason=stream.finish_reason or "error",
    )  # fmt: skip
    return done, versions


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_spans_say_exactly_where_the_weights_changed(
    launch: Launch, checkpoint: Checkpoint, policy: str, late: bool
) -> None:
    t1 = checkpoint("llama", 1)
    async with launch() as engine:
        old = await engine.generate(PROMPT, LONG)
        done, versions = await _split(engine, t1, policy, late=late)
        swap = versions.index(1)
        assert versions == [0] * swap + [1] * (len(versions) - swap)
        assert 10 <= swap < 200
        assert len(done.token_ids) == 200
        assert list(done.token_ids[:swap]) == list(old.token_ids[:swap])
        rest = SamplingParams(max_tokens=200 - swap, temperature=0.0, ignore_eos=True)
        fresh = await engine.generate([*PROMPT, *done.token_ids[:swap]], rest)
        assert fresh.spans == ((1, 0, 200 - swap),)
        if policy == "recompute":
            assert list(done.token_ids[swap:]) == list(fresh.token_ids)
            assert done.logprobs[swap:] == pytest.approx(fresh.logprobs, abs=1e-5)
        else:
            assert done.logprobs[swap] != pytest.approx(fresh.logprobs[0], abs=1e-5)


async def test_sixteen_long_requests_survive_a_refit_that_keeps_them(launch: Launch, checkpoint: Checkpoint) -> None:
    async with launch() as engine:
        tasks = [asyncio.create_task(engine.generate([97 + n, 98], LONG)) for n in range(16)]
        await asyncio.sleep(0.1)
        report = await engine.refit(checkpoint("llama", 1), weight_version=1, policy="keep")
        done = await asyncio.gather(*tasks)
        assert {c.finish_reason for c in done} == {"length"}
        assert {tuple(s.weight_version for s in c.spans) for c in done} == {(0, 1)}
        assert report.replicas["replica-0"].live == 16
        assert report.bubble is not None


async def test_wait_drains_and_abort_returns_what_was_made_once(launch: Launch, checkpoint: Checkpoint) -> None:
    async with launch() as engine:
        for version, policy, reason in ((1, "wait", "length"), (2, "abort", "abort")):
            tasks = [asyncio.create_task(engine.generate([97 + n, 98], LONG)) for n in range(4)]
            await asyncio.sleep(0.05)
            await engine.refit(checkpoint("llama", version % 2), weight_version=version, policy=policy)  # type: ignore[arg-type]
            done = await asyncio.gather(*tasks)
            assert {c.finish_reason for c in done} == {reason}
            assert {tuple(s.weight_version for s in c.spans) for c in done} == {(version - 1,)}
            assert all(len(c.logprobs) == len(c.token_ids) > 0 for c in done)
        assert all(len(c.token_ids) < 200 for c in done)


async def test_a_shared_prefix_is_not_read_from_the_cache_of_the_old_weights(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    prefix = [(7 * n) % 250 for n in range(100)]
    async with launch("llama", 1) as fresh:
        wanted = await fresh.generate([*prefix, 3], GREEDY)
    for policy in ("keep", "recompute"):
        async with launch() as engine:
            await engine.generate([*prefix, 1], GREEDY)
            assert (await engine.generate([*prefix, 2], GREEDY)).cached_tokens == 96
            holding = engine.stream(prefix, LONG)
            await anext(holding)
            await engine.refit(checkpoint("llama", 1), weight_version=1, policy=policy)
            after = await engine.generate([*prefix, 3], GREEDY)
            assert after.cached_tokens == 0
            assert list(after.token_ids) == list(wanted.token_ids)
            await holding.aclose()


async def test_a_version_that_comes_again_after_a_rebase_reads_nothing_from_the_cache_of_the_first(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    prefix = [(7 * n) % 250 for n in range(100)]
    async with launch("llama", 0) as engine:
        wanted = await engine.generate([*prefix, 3], GREEDY)
        await engine.refit(checkpoint("llama", 1), weight_version=1)
        holding = engine.stream(prefix, LONG)
        await anext(holding)
        old = await engine.generate([*prefix, 2], GREEDY)
        assert old.cached_tokens == 96
        with pytest.raises(errors.StaleVersion, match="rebase=True"):
            await engine.refit(checkpoint("llama", 0), weight_version=1)
        # Under `keep` the engine refuses to reset its cache: the salt alone keeps the two versions 1 apart.
        await engine.refit(checkpoint("llama", 0), weight_version=1, policy="keep", rebase=True)
        after = await engine.generate([*prefix, 3], GREEDY)
        assert after.cached_tokens == 0
        assert list(after.token_ids) == list(wanted.token_ids)
        assert (engine.staleness(old), engine.staleness(after)) == (1, 0)
        await holding.aclose()


async def test_a_request_that_waits_in_the_engine_at_the_swap_runs_whole_under_the_new_weights(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    async with launch("llama", 1) as fresh:
        wanted = await fresh.generate(PROMPT, GREEDY)
    async with launch(max_num_seqs=2) as engine:
        running = [asyncio.create_task(engine.generate([97 + n], LONG)) for n in range(2)]
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(engine.generate(PROMPT, GREEDY))
        await asyncio.sleep(0.02)
        await engine.refit(checkpoint("llama", 1), weight_version=1, policy="keep")
        done = await waiting
        assert done.spans == ((1, 0, 24),)
        assert done.cached_tokens == 0
        assert list(done.token_ids) == list(wanted.token_ids)
        await asyncio.gather(*running)


async def test_a_version_rewritten_in_the_same_folder_is_the_one_that_is_loaded(
    launch: Launch, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    import shutil

    async with launch("llama", 1) as fresh:
        wanted = await greedy(fresh)
    folder = tmp_path / "same"
    shutil.copytree(checkpoint("llama", 0), folder)
    async with launch() as engine:
        await engine.refit(folder, weight_version=1)
        before = await greedy(engine)
        shutil.copy(checkpoint("llama", 1) / "model.safetensors", folder / "model.safetensors")
        await engine.refit(folder, weight_version=2)
        assert await greedy(engine) == wanted != before
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(errors.CheckpointUnreadable):
            await engine.refit(folder, weight_version=3)
        assert await greedy(engine) == wanted
        with pytest.raises(errors.CheckpointUnreadable):
            await engine.refit(tmp_path / "absent", weight_version=3)


@pytest.mark.parametrize(("sent", "fine"), [("embed", True), ("head", True), ("equal", True), ("different", False)])
async def test_a_tied_model_takes_either_name_and_refuses_two_that_differ(
    launch: Launch, checkpoint: Checkpoint, sent: str, fine: bool
) -> None:
    from safetensors.torch import load_file

    tensors = load_file(checkpoint("tied", 1) / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    tensors.pop("lm_head.weight", None)
    if sent != "embed":
        tensors["lm_head.weight"] = embed.clone() + (sent == "different")
    if sent == "head":
        del tensors["model.embed_tokens.weight"]
    async with launch("tied", 1) as fresh:
        wanted = await greedy(fresh)
    async with launch("tied", 0) as engine:
        before = await greedy(engine)
        if fine:
            assert (await engine.refit(tensors, weight_version=1)).outcome is Outcome.COMMITTED
            assert await greedy(engine) == wanted
        else:
            with pytest.raises(errors.TiedTensorsDiffer, match="lm_head"):
                await engine.refit(tensors, weight_version=1)
            assert await greedy(engine) == before


async def test_fingerprints_tell_versions_apart_and_replicas_of_one_version_agree(
    launch: Launch, checkpoint: Checkpoint
) -> None:
    async with launch(replicas=2) as engine:
        before = await engine.fingerprints()
        assert before["replica-0"] == before["replica-1"]
        await engine.refit(checkpoint("llama", 1), weight_version=1)
        after = await engine.fingerprints()
        assert after["replica-0"] == after["replica-1"] != before["replica-0"]
        await engine.refit(checkpoint("llama", 0), weight_version=2)
        assert await engine.fingerprints() == before
