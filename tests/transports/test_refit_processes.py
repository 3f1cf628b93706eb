"""Trainer, engine and worker in three processes: what arrives is what was sent, over and over, and nothing is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.transports.children import child, sha, train, work
from tests.transports.rig import rig
from tests.transports.weights import weights


async def test_weights_arrive_bit_for_bit_and_the_segment_is_used_again(tmp_path: Path) -> None:
    orders = [(1, {}), (2, {"policy": "keep", "deadlines": {"silence": 4.0}}), (3, {})]
    async with rig(tmp_path) as engine:
        with child(work) as first, child(work) as second, child(train, engine.link.address, orders) as trainer:
            for version, options in orders:
                trainer.pipe.send("go")
                sending = await engine.offer()
                assert sending.offer.weight_version == version
                assert (sending.policy, sending.deadlines) == (options.get("policy"), options.get("deadlines", {}))
                engine.progress.clear()
                report = await engine.refit(sending, [first, second], release=False)
                assert report.error is None
                expected = {name: sha(tensor) for name, tensor in weights(version).items()}
                for worker in (first, second):
                    assert await asyncio.to_thread(worker.ask, "content") == expected
                await engine.release(sending, [first, second])
                assert [p.kind for p in engine.progress].count("landed") == 2
                assert await asyncio.to_thread(trainer.answer) == sending.offer.refit_id
                assert await asyncio.to_thread(trainer.answer) == ("committed", "shared_memory", version)
    assert len(set(engine.buffers)) == 1
