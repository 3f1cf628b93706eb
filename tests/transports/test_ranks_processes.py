"""Ranks that are processes, share tensors over gloo, and train while the refit of what they shared runs."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.transports.children import child, train_rank
from tests.transports.test_publisher import shas
from tests.transports.weights import weights
from tests.transports.wired import Wired

RANKS, VERSIONS = 4, 3


async def test_gathers_sends_and_training_steps_of_four_ranks_never_wait_for_each_other_in_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with Wired() as engine:
        with ExitStack() as stack:
            store = str(tmp_path / "store")
            children = [
                stack.enter_context(child(train_rank, engine.address, rank, RANKS, store, VERSIONS))
                for rank in range(RANKS)
            ]
            for version in range(1, VERSIONS + 1):
                said = [await asyncio.to_thread(one.answer, 40.0) for one in children]
                assert len(set(said)) == 1
                assert (said[0][0], said[0][2]) == ("committed", RANKS)
                assert engine.weight_version is not None
                assert engine.weight_version >= version
            assert engine.sim.content == shas({name: t.contiguous() for name, t in weights(VERSIONS).items()})
            for one in children:
                one.pipe.send("go")
            for one in children:
                await asyncio.to_thread(one.process.join, 20)
                assert one.process.exitcode == 0
