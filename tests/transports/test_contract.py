"""The shared-memory transport keeps the contract: with receivers in threads, and in processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from pitstop.engine.contract import Rank, ThreadRank, TransportBench, TransportContract
from pitstop.engine.contract.transport import digest_of
from pitstop.engine.worker_ports import Receiver, Ticket, WorkerLayout
from pitstop.transports.memory_link import memory_sending
from pitstop.transports.ring_receiver import RingReceiver
from pitstop.transports.shared_memory import SegmentReceiver
from tests.transports.children import Child, child, sha, work
from tests.transports.rig import Rig, rig
from tests.transports.test_ring import RINGS, ring
from tests.transports.weights import weights

LIMITS = (20.0, 1.5)


def receiver(ticket: Ticket) -> Receiver:
    return RingReceiver(ticket) if ticket.slots else SegmentReceiver(ticket)


def bench_of(engine: Rig, ranks: list[Rank]) -> TransportBench:
    return TransportBench(
        transport=engine.transport, inventory=engine.model, ranks=ranks, limits=LIMITS,
        sending=lambda version: memory_sending(weights(version), weight_version=version),
        content=lambda version: {name: digest_of(tensor) for name, tensor in weights(version).items()},
    )  # fmt: skip


@pytest.mark.parametrize("buckets", [None, *RINGS], ids=lambda buckets: "whole" if buckets is None else f"{buckets}")
@pytest.mark.parametrize("claim", TransportContract.claims())
async def test_with_receivers_in_threads(claim: str, buckets: int | None, tmp_path: Path) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[TransportBench]:
        async with rig(tmp_path, buffers=None if buckets is None else ring(RINGS[buckets])) as engine:
            places = [WorkerLayout(f"r{n}", 1, rank, 2, os.getpid(), "cpu") for n in range(2) for rank in range(2)]
            ranks: list[Rank] = [ThreadRank(place, receiver) for place in places]
            try:
                yield bench_of(engine, ranks)
            finally:
                for rank in ranks:
                    await rank.release()

    await TransportContract(make).check(claim)


class ProcessRank:
    def __init__(self, made: Child, n: int) -> None:
        self.layout = WorkerLayout(f"r{n}", 1, 0, 1, made.pid, "cpu")
        self.child = made

    async def receive(self, ticket: Ticket) -> None:
        await asyncio.to_thread(self.child.receive, ticket)

    async def content(self) -> Mapping[str, str] | None:
        content: Mapping[str, str] | None = await asyncio.to_thread(self.child.ask, "content")
        return content

    async def release(self) -> None:
        await asyncio.to_thread(self.child.ask, "release")


@pytest.mark.parametrize(
    ("claim", "how"),
    [
        ("what_lands_is_what_was_sent_bit_by_bit", signal.SIGKILL),
        ("what_landed_stays_until_it_is_let_go_of", signal.SIGKILL),
        ("a_receiver_that_is_struck_is_reported", signal.SIGKILL),
        ("a_receiver_that_is_struck_is_reported", signal.SIGSTOP),
    ],
)
async def test_with_receivers_in_processes(claim: str, how: signal.Signals, tmp_path: Path) -> None:
    async def strike(rank: Rank) -> None:
        assert isinstance(rank, ProcessRank)
        os.kill(rank.child.pid, how)

    @asynccontextmanager
    async def make() -> AsyncIterator[TransportBench]:
        with ExitStack() as stack:
            ranks: list[Rank] = [ProcessRank(stack.enter_context(child(work)), n) for n in range(2)]
            async with rig(tmp_path) as engine:
                bench = bench_of(engine, ranks)
                bench.strike = strike
                bench.content = lambda version: {name: sha(tensor) for name, tensor in weights(version).items()}
                yield bench

    await TransportContract(make).check(claim)
