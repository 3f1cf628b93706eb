"""The bucket ring: what arrives is what was sent, however small the slots, slow the readers or many of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pitstop.engine.errors import DeadlineExceeded, DigestMismatch, PeerLost
from pitstop.engine.refit import route
from pitstop.engine.worker_ports import Mode
from pitstop.transports import ring_receiver
from pitstop.transports.buckets import cut, place
from pitstop.transports.memory_link import memory_sending
from pitstop.transports.room import Buffers
from tests.transports.children import Worker, child, crawl, sha, train, work
from tests.transports.rig import rig, until
from tests.transports.weights import inventory, weights

SPECS = inventory(weights(0)).tensors
WHOLE = place(SPECS)[1]
RINGS = {1: WHOLE, 4: WHOLE // 4 // 512 * 512 + 1024, 40: 1024}
"""Slots of so many bytes cut the model into about so many buckets."""


def ring(slot_nbytes: int, slots: int = 2) -> Buffers:
    return Buffers(most_nbytes=0, slots=slots, slot_nbytes=slot_nbytes)


def expected(version: int) -> dict[str, str]:
    return {name: sha(tensor) for name, tensor in weights(version).items()}


def test_the_rings_here_have_the_buckets_they_claim() -> None:
    counts = {about: len(cut(SPECS, nbytes)) for about, nbytes in RINGS.items()}
    assert counts[1] == 1
    assert 3 <= counts[4] <= 5
    assert counts[40] >= 40


@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("buckets", RINGS)
async def test_a_version_goes_through_a_ring_bit_for_bit_over_and_over(
    tmp_path: Path, buckets: int, mode: Mode
) -> None:
    async with rig(tmp_path, buffers=ring(RINGS[buckets]), mode=mode) as engine:
        orders: list[tuple[int, dict[str, object]]] = [(1, {}), (2, {}), (1, {})]
        with child(work) as first, child(work) as second, child(train, engine.link.address, orders) as trainer:
            for version, _ in orders:
                trainer.pipe.send("go")
                sending = await engine.offer()
                report = await engine.refit(sending, [first, second], release=False)
                assert report.error is None
                for worker in (first, second):
                    assert await asyncio.to_thread(worker.ask, "content") == expected(version)
                    assert (await asyncio.to_thread(worker.ask, "groups") > 1) is (mode == "in_place" and buckets > 1)
                await engine.release(sending, [first, second])
                await asyncio.to_thread(trainer.answer)
                assert (await asyncio.to_thread(trainer.answer))[0] == "committed"
                assert sending.transport == "shared_memory_ring"
    assert len(set(engine.buffers)) == 1


async def test_in_place_tensors_that_have_a_place_are_received_right_there(tmp_path: Path) -> None:
    import torch

    for buckets in RINGS:
        (tmp_path / str(buckets)).mkdir()
        async with rig(tmp_path / str(buckets), buffers=ring(RINGS[buckets]), mode="in_place") as engine:
            first, second = Worker(), Worker()
            first.sink.live = {n: torch.empty_like(t) for k, (n, t) in enumerate(weights(1).items()) if k % 3}
            first.sink.refuses = 2  # somebody else has them: it is waited for
            # What lies elsewhere than the ring is out of reach for who copies.
            elsewhere = {n: torch.empty_like(t, device="meta") for n, t in weights(1).items()}
            second.sink.places = lambda elsewhere=elsewhere: elsewhere  # type: ignore[method-assign, misc]
            for version in (1, 2):
                sending = memory_sending(weights(version).items(), weight_version=version)
                assert (await engine.refit(sending, [first, second], release=False)).error is None
                for worker in (first, second):
                    assert await asyncio.to_thread(worker.content) == expected(version)
                assert {n: sha(t) for n, t in first.sink.live.items()}.items() <= expected(version).items()
                await engine.release(sending, [first, second])
            assert (first.sink.held >= 2, second.sink.held) == (True, 0)


async def test_b05_tensors_around_the_size_of_a_bucket_and_far_above_it_all_arrive(tmp_path: Path) -> None:
    import torch

    slot, odd = 64 << 10, {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for nbytes in (256, slot - dtype.itemsize, slot, slot + dtype.itemsize, 5 * slot + 3 * dtype.itemsize):
            odd[f"{name}.{nbytes}"] = torch.randn(nbytes // dtype.itemsize).to(dtype)
    odd["across"] = torch.randn(300, 200).t()  # has to be copied to be flat
    async with rig(tmp_path, inventory(odd), buffers=ring(slot)) as engine:
        for mode in ("staged", "in_place"):
            engine.mode = mode
            worker, sending = Worker(), memory_sending(odd.items(), weight_version=1)
            assert (await engine.refit(sending, [worker], release=False)).error is None
            assert await asyncio.to_thread(worker.content) == {name: sha(tensor) for name, tensor in odd.items()}
            await engine.release(sending, [worker])


async def test_a_checkpoint_goes_through_a_ring_cast_or_not(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    wide = {name: torch.randn(n, 33) for name, n in (("a", 1), ("b", 700), ("c", 90))}
    save_file(wide, tmp_path / "model.safetensors")
    for dtype, cast in (("float32", None), ("bfloat16", "inventory"), ("float16", "inventory")):
        wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in wide.items()}
        (tmp_path / dtype).mkdir()
        async with rig(tmp_path / dtype, inventory(wanted), buffers=ring(4096)) as engine:
            worker, sending = Worker(), memory_sending(tmp_path, weight_version=1, cast=cast)  # type: ignore[arg-type]
            assert (await engine.refit(sending, [worker], release=False)).error is None
            assert await asyncio.to_thread(worker.content) == {name: sha(tensor) for name, tensor in wanted.items()}
            await engine.release(sending, [worker])


@pytest.mark.parametrize("mode", ["staged", "in_place"])
async def test_a_trainer_of_the_engines_process_uses_the_ring_as_well(tmp_path: Path, mode: Mode) -> None:
    async with rig(tmp_path, buffers=ring(2048, slots=3), mode=mode) as engine:
        worker = Worker()
        for version in (1, 2):
            sending = memory_sending(weights(version).items(), weight_version=version)
            report = await engine.refit(sending, [worker], release=False)
            assert report.error is None
            assert await asyncio.to_thread(worker.content) == expected(version)
            await engine.release(sending, [worker])
            assert sending.transport == "memory_ring"


async def test_b33_a_reader_that_sleeps_before_each_bucket_never_sees_another_buckets_bytes(tmp_path: Path) -> None:
    async with rig(tmp_path, buffers=ring(4096)) as engine:
        with child(work) as first, child(work) as second, child(work) as sleeper:
            await asyncio.to_thread(sleeper.ask, "dawdle", 0.03)
            for version in (1, 2):
                sending = memory_sending(weights(version).items(), weight_version=version)
                report = await engine.refit(sending, [first, second, sleeper], release=False)
                assert report.error is None
                for worker in (first, second, sleeper):
                    assert await asyncio.to_thread(worker.ask, "content") == expected(version)
                await engine.release(sending, [first, second, sleeper])


async def test_a_reader_that_takes_too_long_over_a_bucket_is_evicted_and_the_others_land(tmp_path: Path) -> None:
    async with rig(tmp_path, buffers=ring(4096), mode="staged") as engine:
        engine.limits = (60.0, 1.0)  # so that six silences are six seconds
        with child(work) as well, child(work) as stuck:
            await asyncio.to_thread(stuck.ask, "dawdle", 9.0)
            sending = memory_sending(weights(1).items(), weight_version=1)
            report = await engine.refit(sending, [well, stuck], release=False)
            assert isinstance(report.error, DeadlineExceeded)
            assert report.error.fields["rank"] == 1
            assert "6 s over one bucket" in report.error.message
            await until(lambda: any(p.kind == "landed" and p.rank == 0 for p in engine.progress), 20)


@pytest.mark.parametrize("mode", ["staged", "in_place"])
async def test_a_reader_killed_between_two_buckets_fails_alone(tmp_path: Path, mode: Mode) -> None:
    async with rig(tmp_path, buffers=ring(4096), mode=mode) as engine:
        with child(work) as well, child(work) as struck:
            await asyncio.to_thread(struck.ask, "dawdle", 0.2)
            sending = memory_sending(weights(1).items(), weight_version=1)
            tickets = await engine.plan(sending, [well, struck])
            watch = asyncio.create_task(engine.ended(sending.offer.refit_id, 2))
            for worker, ticket in zip((well, struck), tickets, strict=True):
                await asyncio.to_thread(worker.receive, ticket)
            await until(lambda: engine.here(sending.offer.refit_id) == 2)
            pace = engine.transport.ring(sending.offer.refit_id)
            assert pace is not None
            sent = asyncio.create_task(sending.send(route(sending.offer, engine.model), tickets, pace))
            await until(lambda: pace.drained >= 2)
            struck.process.kill()
            await engine.transport.seal(await sent)
            ends = {p.rank: p for p in await watch if p.kind != "attached"}
            assert (ends[0].kind, ends[1].kind) == ("landed", "failed")
            assert ends[1].error is not None
            assert ends[1].error.slug == "peer_lost"
            assert await asyncio.to_thread(well.ask, "content") == expected(1)
            await engine.release(sending, [well])
            again = memory_sending(weights(2).items(), weight_version=2)
            assert (await engine.refit(again, [well])).error is None


async def test_a_trainer_killed_while_it_fills_the_ring_is_lost_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path, buffers=ring(4096)) as engine:
        with child(work) as worker, child(crawl, engine.link.address, {}) as trainer:
            refit = asyncio.create_task(engine.refit(await engine.offer(), [worker]))
            assert await asyncio.to_thread(trainer.answer) == "sending"
            trainer.process.kill()
            assert isinstance((await refit).error, PeerLost)
            assert (await engine.refit(memory_sending(weights(2).items(), weight_version=2), [worker])).error is None


async def test_what_a_loader_has_written_over_a_slot_spoils_one_refit_and_not_the_next(tmp_path: Path) -> None:
    async with rig(tmp_path, buffers=ring(4096)) as engine:
        worker = Worker()
        for version, fine in ((1, True), (2, False), (3, True)):
            if version == 2:
                # The pages become this process's own, and would show for ever what they show now.
                for mapping in ring_receiver._kept._mappings.values():
                    mapping.bytes[:] = 255
            sending = memory_sending(weights(version).items(), weight_version=version)
            report = await engine.refit(sending, [worker], release=False)
            assert (report.error is None) is fine
            if fine:
                assert await asyncio.to_thread(worker.content) == expected(version)
            else:
                assert isinstance(report.error, DigestMismatch)
            await engine.release(sending, [worker])
