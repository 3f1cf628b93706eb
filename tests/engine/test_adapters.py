"""Which version of an adapter a request gets, when an old one leaves, and that what fails changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pitstop.engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotServing,
    StaleVersion,
    UnsupportedPolicy,
    WorkerFailed,
)
from pitstop.engine.ports import AdapterHost
from pitstop.engine.refit import RefitOptions
from pitstop.engine.request import Adapter, Request, SamplingParams
from pitstop.engine.simulated import Delays, SimulatedBackend, SimulatedLeg
from tests.engine.sim import SimFleet, fleet, until

LONG = SamplingParams(max_tokens=2000)
SHORT = SamplingParams(max_tokens=3)


class Host(SimulatedBackend):
    """Keeps the numbers of the adapters that it holds, and what was submitted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.held: set[int] = set()
        self.submitted: list[Request] = []
        self.refuses: Exception | None = None
        self.stuck = False

    async def load_adapter(self, adapter: Adapter) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        if self.refuses is not None:
            raise self.refuses
        self.held.add(adapter.number)

    async def unload_adapter(self, adapter: Adapter) -> None:
        self.held.discard(adapter.number)

    async def submit(self, request: Request) -> SimulatedLeg:
        assert request.adapter is None or request.adapter.number in self.held
        self.submitted.append(request)
        return await super().submit(request)


class Hosts(SimFleet):
    def __init__(self, n: int = 1, **options: Any) -> None:
        self.hosts = [Host(**options) for _ in range(n)]
        super().__init__(self.hosts)
        self.gone: list[int] = []
        self._adapters.discard = lambda adapter: self.gone.append(adapter.number)

    async def bring(self, name: str, version: int, seconds: float = 5.0) -> Adapter:
        async def write(folder: str) -> str:
            return f"/run/{folder}"

        return await self._adapters.bring(name, version, write, seconds)


def test_the_simulation_and_the_real_backend_say_whether_they_run_adapters() -> None:
    from pitstop.engine.vllm_backend import VllmBackend

    assert isinstance(Host(), AdapterHost)
    assert isinstance(VllmBackend("x"), AdapterHost)
    assert not isinstance(SimulatedBackend(), AdapterHost)


async def test_every_version_is_another_adapter_to_the_engines_and_salts_its_cache_entries() -> None:
    async with Hosts(2) as engines:
        first, second = await engines.bring("math", 1), await engines.bring("math", 2)
        assert (first.number, first.path) != (second.number, second.path)
        other = await engines.bring("code", 1)
        assert engines.adapters == {"math": 2, "code": 1}
        await until(lambda: engines.gone == [first.number])
        assert [host.held for host in engines.hosts] == [{second.number, other.number}] * 2
        for name in ("math", "code", None):
            done = await engines.generate([1, 2], SHORT, adapter=name)
            assert done.adapter == {"math": second, "code": other, None: None}[name]
        salts = [request.cache_salt for host in engines.hosts for request in host.submitted]
        assert sorted(salt.partition(".a")[2] for salt in salts) == ["", str(second.number), str(other.number)]


async def test_an_old_version_leaves_with_the_last_request_that_runs_on_it() -> None:
    async with Hosts() as engines:
        first = await engines.bring("math", 1)
        streams = [engines.stream([1], LONG, adapter="math") for _ in range(2)]
        for stream in streams:
            await anext(stream)
        second = await engines.bring("math", 2)
        after = engines.stream([1], LONG, adapter="math")
        await anext(after)
        assert [stream.adapter for stream in (*streams, after)] == [first, first, second]
        await streams[0].aclose()
        await asyncio.sleep(0.05)
        assert engines.hosts[0].held == {first.number, second.number}
        assert engines.gone == []
        await streams[1].aclose()
        await until(lambda: engines.gone == [first.number])
        assert engines.hosts[0].held == {second.number}
        await engines._adapters.drop("math")
        assert engines.adapters == {}
        await asyncio.sleep(0.05)
        assert engines.hosts[0].held == {second.number}
        await after.aclose()
        await until(lambda: engines.gone == [first.number, second.number])
        assert engines.hosts[0].held == set()


async def test_a_request_that_waits_for_admission_gets_the_version_that_is_there_when_it_is_admitted() -> None:
    async with Hosts() as engines:
        await engines.bring("math", 1)
        engines.replicas[0].gate.close()
        waiting = asyncio.create_task(engines.generate([1], SHORT, adapter="math"))
        await asyncio.sleep(0.02)
        second = await engines.bring("math", 2)
        await engines.refit_to(1)
        assert (await waiting).adapter == second


async def test_a_request_that_a_refit_withdraws_goes_on_though_its_adapter_was_dropped_meanwhile() -> None:
    async with Hosts(delays=Delays(step=0.2)) as engines:
        first = await engines.bring("math", 1)
        running = asyncio.create_task(engines.generate([1], SHORT, adapter="math"))
        await until(lambda: engines.hosts[0].submitted)
        await engines._adapters.drop("math")
        await engines.refit_to(1, RefitOptions(policy="keep"))
        done = await running
        assert (done.finish_reason, done.spans, done.adapter) == ("length", ((1, 0, 3),), first)
        await until(lambda: engines.gone == [first.number])
        assert [request.adapter for request in engines.hosts[0].submitted] == [first, first]


async def test_what_one_replica_cannot_load_leaves_every_replica_with_the_version_before() -> None:
    async with Hosts(3) as engines:
        first = await engines.bring("math", 1)
        engines.hosts[1].refuses = WorkerFailed("no room for it")
        with pytest.raises(WorkerFailed, match="no room"):
            await engines.bring("math", 2)
        await until(lambda: engines.gone == [2])
        assert [host.held for host in engines.hosts] == [{first.number}] * 3
        assert engines.adapters == {"math": 1}
        engines.hosts[1].refuses = None
        engines.hosts[2].stuck = True
        with pytest.raises(DeadlineExceeded, match=r"replica-2: adapter did not end within 0.1 s"):
            await engines.bring("math", 2, 0.1)
        await until(lambda: engines.gone == [2, 3])
        assert [host.held for host in engines.hosts] == [{first.number}] * 3
        engines.hosts[2].stuck = False
        await engines.bring("math", 2)
        assert engines.adapters == {"math": 2}


async def test_versions_of_an_adapter_grow_and_names_must_be_known() -> None:
    async with Hosts() as engines:
        await engines.bring("math", 2)
        for version in (1, 2):
            with pytest.raises(StaleVersion, match=f"version {version} of adapter math is not above 2"):
                await engines.bring("math", version)
        with pytest.raises(InvalidRequest, match=r"no adapter named 'maths', but math\..*did you mean math"):
            engines.stream([1], adapter="maths")
        async with engines.generate_async([[1], [2]], SHORT, adapter="nothing") as completions:
            said = [done async for _, done in completions]
        assert [type(done.error) for done in said] == [InvalidRequest] * 2
        with pytest.raises(InvalidRequest):
            await engines._adapters.drop("code")


async def test_engines_that_run_no_adapters_say_so_and_a_fleet_without_a_replica_waits_for_none() -> None:
    async with fleet() as plain:

        async def write(folder: str) -> str:
            raise AssertionError

        with pytest.raises(UnsupportedPolicy, match="runs no adapters"):
            await plain._adapters.bring("math", 1, write, 1.0)
    async with Hosts() as engines:
        engines.hosts[0].die()
        await until(lambda: engines.phase().value == "dead")
        with pytest.raises(NotServing, match="no replica is there"):
            await engines.bring("math", 1)
        assert engines.adapters == {}
