"""Faults met in the field, on the whole-segment transport. Each test names its row (`tests/FIELD_FAULTS.md`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.errors import PeerLost, WorkerFailed
from pitstop.engine.refit import Outcome, route
from pitstop.engine.worker_ports import Bucket
from pitstop.transports import Publisher
from tests.transports.children import Worker, child, sha, work
from tests.transports.rig import Rig, rig
from tests.transports.weights import inventory, weights

MIB = 1 << 20


class _Fails(Worker):
    """Raises at the third tensor that it loads."""

    def __init__(self) -> None:
        super().__init__()
        landed = self.sink.landed

        def failing(bucket: Bucket) -> None:
            for n, (spec, _) in enumerate(bucket.tensors):
                if n == 2:
                    raise MemoryError(f"no room for tensor {n}, {spec.name}")
            landed(bucket)

        self.sink.landed = failing  # type: ignore[method-assign]


async def _refit(
    engine: Rig, publisher: Publisher, version: int, workers: list[Any]
) -> tuple[Any, BaseException | None]:
    handle = publisher.publish(weights(version), weight_version=version)
    report = await engine.refit(await engine.offer(), workers)
    try:
        await asyncio.to_thread(handle.result, 10)
    except Exception as error:  # noqa: BLE001 - it is what is asked for
        return report, error
    return report, None


async def test_b01_a_receiver_that_raises_gives_both_sides_one_error_with_its_own_message(tmp_path: Path) -> None:
    """Runs B and C, a receiver that is killed or stopped, are in `test_failures.py`."""
    async with rig(tmp_path) as engine:
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        began = time.monotonic()
        report, error = await _refit(engine, publisher, 1, [_Fails()])
        assert time.monotonic() - began < 5
        assert isinstance(report.error, WorkerFailed)
        assert type(error) is WorkerFailed
        for said in (report.error, error):
            assert "no room for tensor 2" in str(said)
            assert (said.fields["replica"], said.fields["kind"]) == ("r0", "MemoryError")
        assert "MemoryError" in (report.error.remote_traceback or "")
        # Another receiver in its place, the same trainer: it works.
        report, error = await _refit(engine, publisher, 2, [Worker()])
        assert (report.outcome, error) == (Outcome.COMMITTED, None)
        await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_b05_tensors_of_any_size_around_a_megabyte_arrive_bit_for_bit_through_one_segment(
    tmp_path: Path, dtype: str
) -> None:
    import torch

    kind = getattr(torch, dtype)
    width = kind.itemsize
    sizes = {"small": 4096, "below": MIB - width, "equal": MIB, "above": MIB + width, "large": 5 * MIB + 3 * width}
    sent = {name: torch.randn(nbytes // width).to(kind) for name, nbytes in sizes.items()}
    async with rig(tmp_path, inventory(sent)) as engine:
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        worker = Worker()
        publisher.publish(sent, weight_version=1)
        report = await engine.refit(await engine.offer(), [worker], release=False)
        assert report.error is None
        assert await asyncio.to_thread(worker.content) == {name: sha(tensor) for name, tensor in sent.items()}
        await asyncio.to_thread(worker.release)
        await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize("when", ["before it says that it is there", "after it is there", "never"])
async def test_b35_a_receiver_that_is_gone_costs_its_limit_and_leaves_nothing(tmp_path: Path, when: str) -> None:
    before = set(os.listdir("/dev/shm"))
    async with rig(tmp_path) as engine:
        engine.limits = (8.0, 2.0)
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        handle = publisher.publish(weights(1), weight_version=1)
        sending = await engine.offer()
        with child(work) as worker:
            tickets = await engine.plan(sending, [worker])
            if when == "after it is there":
                await asyncio.to_thread(worker.receive, tickets[0])
            if when != "never":
                worker.process.kill()
                worker.process.join()
            began = time.monotonic()
            await engine.transport.seal(await sending.send(route(sending.offer, engine.model), tickets))
            (over,) = await engine.ended(sending.offer.refit_id, 1)
            assert time.monotonic() - began < 2.0 + 2.0
        assert over.error is not None
        assert (over.error.slug, over.error.fields["replica"]) == ("peer_lost", "r0")
        lost = PeerLost(over.error.message)
        await engine.transport.release(sending.offer.refit_id)
        await sending.settled(engine.report(sending, lost))
        with pytest.raises(PeerLost):
            await asyncio.to_thread(handle.result, 5)
        began = time.monotonic()
        await asyncio.to_thread(publisher.close)
        assert time.monotonic() - began < 2
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "pitstop" in name]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]


async def test_b47_one_rank_that_fails_fails_the_refit_for_all_four_and_none_is_left_waiting(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        ranks = [Worker(), Worker(), _Fails(), Worker()]
        began = time.monotonic()
        report, error = await _refit(engine, publisher, 1, ranks)
        assert time.monotonic() - began < 5
        assert "no room for tensor 2" in str(report.error)
        assert "no room for tensor 2" in str(error)
        assert [worker.sink.bucket for worker in ranks] == [None] * 4
        report, error = await _refit(engine, publisher, 2, [Worker() for _ in range(4)])
        assert (report.outcome, error) == (Outcome.COMMITTED, None)
        await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("raise KeyboardInterrupt", 130)]
)
async def test_b57_a_program_ends_though_its_engine_never_answers(tmp_path: Path, ending: str, code: int) -> None:
    script = textwrap.dedent(f"""
        import sys
        from pitstop.transports import Publisher
        from tests.transports.weights import weights
        try:
            with Publisher.connect(sys.argv[1]) as publisher:
                for version in range(1, 6):
                    publisher.publish(weights(version), weight_version=version)
                print("queued", flush=True)
                sys.stdin.readline()
                {ending}
        except KeyboardInterrupt:
            sys.exit(130)
    """)
    async with rig(tmp_path) as engine:
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, engine.link.address, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        assert program.stdin is not None
        assert (await asyncio.wait_for(program.stdout.readline(), 30)).strip() == b"queued"
        # Offers are taken and never answered.
        program.stdin.write(b"\n")
        began = time.monotonic()
        assert await asyncio.wait_for(program.wait(), 15) == code
        assert time.monotonic() - began < 5


async def test_b55_a_receiver_that_joins_late_hears_all_that_was_said_before_it_came(tmp_path: Path) -> None:
    """Eight of them with random delays; one more that never comes is named in time and keeps nobody waiting."""
    import random

    rng = random.Random(0)
    async with rig(tmp_path) as engine:
        engine.limits = (30.0, 2.0)
        publisher = await asyncio.to_thread(lambda: Publisher.connect(engine.link.address))
        for version in range(1, 6):
            publisher.publish(weights(version), weight_version=version)
            sending = await engine.offer()
            present = [Worker() for _ in range(8)]
            workers = [*present, *([Worker()] if version == 5 else [])]
            tickets = await engine.plan(sending, workers)

            async def join(worker: Worker, n: int, tickets: Any = tickets) -> None:
                await asyncio.sleep(rng.uniform(0, 0.5))
                await asyncio.to_thread(worker.receive, tickets[n])

            joining = [asyncio.create_task(join(worker, n)) for n, worker in enumerate(present)]
            await engine.transport.seal(await sending.send(route(sending.offer, engine.model), tickets))
            began = time.monotonic()
            over = await engine.ended(sending.offer.refit_id, len(workers))
            await asyncio.gather(*joining)
            assert sorted(p.rank for p in over if p.kind == "landed") == list(range(8))
            if version == 5:
                (lost,) = [p for p in over if p.kind == "failed"]
                assert time.monotonic() - began < 2.0 + 2.0
                assert lost.error is not None
                assert (lost.rank, lost.error.fields["rank"], lost.error.slug) == (8, 8, "peer_lost")
            await engine.release(sending, present)
            await sending.settled(engine.report(sending, None))
        await asyncio.to_thread(publisher.close)


async def test_b03_engines_that_start_at_the_same_time_never_share_a_name(tmp_path: Path) -> None:
    for n in range(5):
        async with contextlib.AsyncExitStack() as stack:
            folders = [tmp_path / f"{n}-{m}" for m in range(8)]
            for folder in folders:
                folder.mkdir()
            rigs = await asyncio.gather(
                *(stack.enter_async_context(rig(folder, listen="tcp://127.0.0.1:0")) for folder in folders)
            )
            addresses = {engine.link.tcp_address for engine in rigs}
            assert len(addresses) == 8
            assert None not in addresses
            assert len({engine.link.address for engine in rigs}) == 8
