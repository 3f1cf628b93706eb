"""After a refit the live engine equals one that was started from the new checkpoint, bit for bit."""

from __future__ import annotations

import pytest

from tests.checkpoints import FAMILIES, tensors
from tests.vllm.conftest import Garage


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_refit_equals_a_fresh_start_and_can_be_taken_back(garage: Garage, family: str) -> None:
    live, fresh = await garage.start(family, 0), await garage.start(family, 1)
    before, wanted = await live.run(), await fresh.run()
    await live.refit(tensors(family, 0))
    assert (await live.run(salt="w1"))[:2] == before[:2]
    await live.refit(tensors(family, 1))
    assert (await live.run(salt="w2"))[:2] == wanted[:2]
    await live.refit(tensors(family, 0))
    assert (await live.run(salt="w3"))[:2] == before[:2]
    assert before.token_ids != wanted.token_ids
