"""The contract suite: what keeps it passes, and what breaks a claim is told which."""

from __future__ import annotations

import hashlib
import unittest
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pitstop.engine.contract import (
    BackendBench,
    BackendContract,
    ContractBroken,
    TransportBench,
    TransportContract,
)
from pitstop.engine.ports import Leg
from pitstop.engine.refit import Policy
from pitstop.engine.request import Request
from pitstop.engine.simulated import Delays, SimulatedBackend, SimulatedSending, SimulatedTransport
from pitstop.engine.worker_ports import Inventory, Offer, Ticket, WorkerLayout, WorkerOp, WorkerReply


def sending_of(backend: SimulatedBackend, version: int) -> SimulatedSending:
    return SimulatedSending(Offer(uuid.uuid4().hex, version, backend.specs))


@asynccontextmanager
async def backend_bench(kind: type[SimulatedBackend] = SimulatedBackend) -> AsyncIterator[BackendBench]:
    backend, transport = kind(delays=Delays(step=0.001), world_size=2), SimulatedTransport()
    backend.transport = transport

    async def kill() -> None:
        backend.die()

    async def tear() -> None:
        backend.script.plan("apply", "raise")

    yield BackendBench(
        backend=backend, transport=transport, sending=lambda version: sending_of(backend, version), kill=kill, tear=tear
    )


class SimRank:
    def __init__(self, transport: SimulatedTransport, n: int) -> None:
        self.layout = WorkerLayout(f"replica-{n}", 1, 0, 1, 0, "simulated")
        self._transport = transport
        self._backend: SimulatedBackend | None = None
        self._refit_id = ""

    async def receive(self, ticket: Ticket) -> None:
        self._backend, self._refit_id = SimulatedBackend(), ticket.refit_id
        self._transport.receive(ticket, self._backend)

    async def content(self) -> Mapping[str, str] | None:
        version = None if self._backend is None else self._backend._staged.get(self._refit_id)
        return None if version is None else content(version)

    async def release(self) -> None:
        self._backend = None


def content(version: int) -> dict[str, str]:
    return {spec.name: hashlib.sha256(f"{version}".encode()).hexdigest() for spec in SimulatedBackend().specs}


@asynccontextmanager
async def transport_bench() -> AsyncIterator[TransportBench]:
    transport = SimulatedTransport()
    backend = SimulatedBackend()
    yield TransportBench(
        transport=transport, inventory=Inventory(backend.specs), ranks=[SimRank(transport, n) for n in range(2)],
        sending=lambda version: sending_of(backend, version), content=content, proves=False,
    )  # fmt: skip


@pytest.mark.parametrize("check", BackendContract(backend_bench).checks(), ids=lambda check: check.__name__)
async def test_the_simulated_backend_keeps_the_contract(check: Any) -> None:
    await check()


UNBOUND = {"a_receiver_that_never_comes_is_reported", "abort_ends_every_receiver_once_and_may_come_twice"}
"""What a transport of one process, in which nobody is ever silent, does not have."""


@pytest.mark.parametrize("claim", [c for c in TransportContract.claims() if c not in UNBOUND])
async def test_the_simulated_transport_keeps_the_contract(claim: str) -> None:
    await TransportContract(transport_bench).check(claim)


class _Deaf(SimulatedBackend):
    """Counts one token too many."""

    async def suspend(self, policy: Policy) -> Mapping[str, int]:
        return {name: made + 1 for name, made in (await super().suspend(policy)).items()}


class _Restless(SimulatedBackend):
    """Is not suspended."""

    async def suspend(self, policy: Policy) -> Mapping[str, int]:
        counts = await super().suspend(policy)
        await super().resume()
        return counts


class _Boastful(SimulatedBackend):
    """Says that every order was done, and does none of them."""

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        if op.verb == "apply":
            return [WorkerReply(rank, touched=True) for rank in range(2)]
        return await super().call_workers(op)


class _OneRank(SimulatedBackend):
    """Forgets its second rank."""

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        return (await super().call_workers(op))[:1]


class _Quiet(SimulatedBackend):
    """Does not tell of its death."""

    async def died(self) -> Any:
        import asyncio

        await asyncio.Event().wait()


class _Sticky(SimulatedBackend):
    """Keeps requests whose submit was cancelled."""

    async def submit(self, request: Request) -> Leg:  # type: ignore[override]
        import asyncio

        leg = await super().submit(request)
        await asyncio.sleep(0)
        return leg


class _Certain(SimulatedBackend):
    """Claims its version in every life."""

    async def start(self, replica: str, incarnation: int) -> Any:
        from dataclasses import replace

        return replace(await super().start(replica, incarnation), weight_version=0)


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        (_Deaf, "a_suspend_counts_exactly_and_no_token_comes_after_it"),
        (_Restless, "a_suspend_counts_exactly_and_no_token_comes_after_it"),
        (_Boastful, "a_version_goes_in_and_another_and_the_first_again"),
        (_Boastful, "an_order_about_nothing_is_an_error_in_the_reply"),
        (_OneRank, "an_order_about_nothing_is_an_error_in_the_reply"),
        (_Quiet, "a_death_is_told_and_every_request_keeps_what_it_had"),
        (_Sticky, "a_submit_that_is_cancelled_leaves_nothing"),
        (_Certain, "a_closed_engine_can_be_closed_again_and_started_anew"),
    ],
)
async def test_a_backend_that_breaks_a_claim_is_found(kind: type[SimulatedBackend], claim: str) -> None:
    with pytest.raises(ContractBroken):
        await BackendContract(lambda: backend_bench(kind), limit=2).check(claim)


async def test_what_a_bench_cannot_do_is_skipped_and_said() -> None:
    @asynccontextmanager
    async def bare() -> AsyncIterator[BackendBench]:
        async with backend_bench() as bench:
            bench.kill = bench.tear = None
            yield bench

    contract = BackendContract(bare)
    for claim in contract.claims():
        if "death" in claim or "half_way" in claim:
            with pytest.raises(unittest.SkipTest, match="this bench cannot"):
                await contract.check(claim)


def test_claims_are_listed_in_order_and_every_one_has_a_check_of_its_name() -> None:
    contract = BackendContract(backend_bench)
    assert [check.__name__ for check in contract.checks()] == list(contract.claims())
    assert contract.claims()[0] == "a_start_says_what_there_is"
    assert len(TransportContract.claims()) == 12
