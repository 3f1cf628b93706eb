"""Load plans on real engines: what is copied, what is not, and that a version is what a fresh start makes of it."""

from __future__ import annotations

import pytest

from pitstop.engine.worker_ports import WorkerOp
from tests.checkpoints import shapes, tensors
from tests.vllm.conftest import Garage
from tests.vllm.harness import Replica

PLAIN = {"worker_cls": "tests.vllm.plain_worker.PlainWorker"}


async def ways(live: Replica) -> list[dict[str, str]]:
    replies = await live.backend.call_workers(WorkerOp("ways", tensors=live.booted.inventory.tensors))
    assert not [reply.error for reply in replies if reply.error]
    return [reply.way_of or {} for reply in replies]


async def same(live: Replica, fresh: Replica, salt: str) -> None:
    """Compare an engine with one that was started from the checkpoint: memory, tokens, logprobs."""
    assert await live.fingerprint() == await fresh.fingerprint()
    assert (await live.run(salt=salt))[:2] == (await fresh.run(salt=salt))[:2]


@pytest.mark.parametrize("family", ["llama", "tied", "qwen2"])
async def test_after_one_version_all_that_follows_is_copied(garage: Garage, family: str) -> None:
    live, old, new = [await garage.start(family, seed, **PLAIN) for seed in (0, 0, 1)]
    assert set((await ways(live))[0].values()) == {"the first version after a start proves the load plan"}
    await live.refit(tensors(family, 1))
    await same(live, new, "1")
    assert set((await ways(live))[0].values()) == {"copied"}
    for n, seed in enumerate((0, 1, 1, 0)):
        await live.refit(tensors(family, seed))
        await same(live, new if seed else old, f"staged {n}")
        await live.refit_in_place(tensors(family, 1 - seed), (1, 4, 40)[n % 3], seed=n)
        await same(live, old if seed else new, f"in place {n}")
