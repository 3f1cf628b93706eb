"""An engine that trainers may reach by TCP."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from pitstop.engine import RolloutEngine
from pitstop.engine.errors import LocalError
from pitstop.engine.simulated import SimulatedBackend
from pitstop.transports import Publisher
from pitstop.transports.address import parsed


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def test_a_trainer_connects_with_the_key_of_the_run(tmp_path: Path) -> None:
    engine = RolloutEngine([SimulatedBackend(weight_version=3)], listen="tcp://:0")
    assert engine.tcp_address is None
    async with engine:
        assert engine.tcp_address is not None
        key = parsed(engine.tcp_address).key
        assert key is not None
        assert stat.S_IMODE(key.stat().st_mode) == stat.S_IMODE(key.with_name("server.key").stat().st_mode) == 0o600
        publisher = await asyncio.to_thread(Publisher.connect, engine.tcp_address)
        assert publisher.weight_version == 3
        await asyncio.to_thread(publisher.close)
    assert not key.exists()


async def test_an_engine_that_is_not_asked_to_does_not_listen() -> None:
    async with RolloutEngine([SimulatedBackend()]) as engine:
        assert engine.tcp_address is None


async def test_keys_of_the_callers_outlive_the_engine(tmp_path: Path) -> None:
    seen = set()
    for _ in range(2):
        async with RolloutEngine([SimulatedBackend()], listen="tcp://:0", keys=tmp_path / "keys"):
            seen.add((tmp_path / "keys/client.key").read_bytes())
    assert len(seen) == 1


async def test_a_port_that_is_taken_is_said_by_the_engine() -> None:
    async with RolloutEngine([SimulatedBackend()], listen="tcp://:0") as engine:
        assert engine.tcp_address is not None
        other = RolloutEngine([SimulatedBackend()], listen=parsed(engine.tcp_address).endpoint)
        with pytest.raises(LocalError, match="cannot be bound"):
            async with other:
                pass
