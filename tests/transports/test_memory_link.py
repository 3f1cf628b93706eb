"""A trainer in the engine's own process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pitstop.engine.errors import CheckpointUnreadable, DeadlineExceeded, LocalError, OfferRejected, WorkerFailed
from pitstop.engine.ports import NullObserver, Work
from pitstop.engine.refit import route
from pitstop.transports.memory_link import checkpoint_sending, memory_sending
from pitstop.transports.pool import WRITING
from pitstop.transports.sources import TensorSource
from tests.transports.children import Worker, sha
from tests.transports.rig import rig
from tests.transports.weights import slow, weights


@pytest.mark.parametrize("kind", ["tensors", "checkpoint"])
async def test_weights_of_this_process_arrive(tmp_path: Path, kind: str) -> None:
    tensors = weights(4)
    async with rig(tmp_path / "run") as engine:
        if kind == "checkpoint":
            await asyncio.to_thread(save_file, tensors, tmp_path / "model.safetensors")
        for version in (4, 5):
            what = tmp_path if kind == "checkpoint" else tensors
            sending = memory_sending(what, weight_version=version, headers={"k": "v"}, refit_id=f"refit-{version}")
            assert (sending.offer.refit_id, sending.offer.headers) == (f"refit-{version}", {"k": "v"})
            worker = Worker()
            assert (await engine.refit(sending, [worker], release=False)).error is None
            assert await asyncio.to_thread(worker.content) == {name: sha(t) for name, t in tensors.items()}
            await engine.release(sending, [worker])
        assert len(set(engine.buffers)) == 1


async def test_masters_are_cast(tmp_path: Path) -> None:
    masters = {name: t.double() if t.is_floating_point() else t for name, t in weights(6).items()}
    async with rig(tmp_path) as engine:
        worker = Worker()
        sending = memory_sending(masters, weight_version=1, cast="inventory")
        assert (await engine.refit(sending, [worker], release=False)).error is None
        expected = {name: sha(t.to(weights(0)[name].dtype)) for name, t in masters.items()}
        assert await asyncio.to_thread(worker.content) == expected
        await engine.release(sending, [worker])


def test_what_cannot_be_read_is_said_when_it_is_offered(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable):
        memory_sending(tmp_path, weight_version=1)
    with pytest.raises(OfferRejected, match="layer is on the meta device"):
        memory_sending({"layer": torch.empty(2, device="meta")}, weight_version=1)


class Broken(TensorSource):
    closed = False

    def pack(self, *arguments: Any) -> Iterator[int]:
        yield 0
        raise ValueError("no such page")

    def close(self) -> None:
        self.closed = True


async def test_a_source_that_fails_is_closed_and_raises_what_happened(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        source = Broken(weights(1).items())
        sending = memory_sending(source, weight_version=1)
        report = await engine.refit(sending, [Worker()])
        assert isinstance(report.error, WorkerFailed)
        assert "no such page" in str(report.error)
        assert source.closed
        assert sending.offer.refit_id not in WRITING
        with pytest.raises(LocalError, match="sent before"):
            await sending.send(route(sending.offer, engine.model), [])


@pytest.mark.parametrize("how", ["cancelled", "too slow"])
async def test_a_send_that_is_given_up_stops_reading(tmp_path: Path, how: str) -> None:
    begun = threading.Event()
    async with rig(tmp_path) as engine:
        engine.limits = (0.3, 5.0) if how == "too slow" else (30.0, 5.0)
        sending = memory_sending(slow(begun.set), weight_version=1)
        tickets = await engine.plan(sending, [Worker()])
        sends = asyncio.ensure_future(sending.send(route(sending.offer, engine.model), tickets))
        assert await asyncio.to_thread(begun.wait, 10)
        if how == "cancelled":
            sends.cancel()
        with pytest.raises(DeadlineExceeded if how == "too slow" else asyncio.CancelledError):
            await sends
        assert sending.offer.refit_id not in WRITING
        await engine.release(sending, [])


async def test_a_source_that_is_never_sent_is_closed(tmp_path: Path) -> None:
    async with rig(tmp_path) as engine:
        source = Broken(weights(1).items())
        sending = memory_sending(source, weight_version=1)
        await sending.settled(engine.report(sending, None))
        assert source.closed


async def test_a_send_is_observed_as_part_of_the_refit(tmp_path: Path) -> None:
    class Recorder(NullObserver):
        said: list[object]

        def opened(self, work: Work) -> Mapping[str, str]:
            self.said = [work.kind, work.key, work.parent]
            return {}

        def closed(self, key: str, at: int, error: str | None = None, detail: object = None) -> None:
            self.said += [key, error]

    recorder = Recorder()
    async with rig(tmp_path) as engine:
        sending = memory_sending(weights(1), weight_version=1, refit_id="x", observer=recorder)
        await engine.refit(sending, [Worker()])
    assert recorder.said == ["send_weights", "send_weights:x", "refit:x", "send_weights:x", None]


@pytest.mark.parametrize("how", ["too late", "cancelled"])
async def test_a_checkpoint_on_a_file_system_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    go_on, closed = threading.Event(), threading.Event()

    class Hung(TensorSource):
        def __init__(self, path: object) -> None:
            go_on.wait(20)
            super().__init__(weights(1).items())

        def close(self) -> None:
            closed.set()

    monkeypatch.setattr("pitstop.transports.sources.CheckpointSource", Hung)
    opening = asyncio.ensure_future(checkpoint_sending(tmp_path, seconds=0.2, weight_version=1))
    if how == "cancelled":
        await asyncio.sleep(0.05)
        opening.cancel()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded if how == "too late" else asyncio.CancelledError):
        await opening
    assert time.monotonic() - began < 2
    # What comes too late is closed.
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 5)


async def test_a_checkpoint_is_opened_in_a_thread_and_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable):
        await checkpoint_sending(tmp_path, seconds=5, weight_version=1)
    await asyncio.to_thread(save_file, weights(4), tmp_path / "model.safetensors")
    sending = await checkpoint_sending(tmp_path, seconds=5, weight_version=4, refit_id="x")
    assert (sending.offer.refit_id, len(sending.offer.tensors)) == ("x", len(weights(4)))
    sending.dropped()
