"""A trainer that is there before the engine serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitstop.engine.errors import EngineClosed, NotServing
from pitstop.engine.refit import Outcome
from tests.transports.children import Worker
from tests.transports.rig import rig
from tests.transports.test_publisher import connected, settled
from tests.transports.weights import weights


async def test_an_offer_to_an_engine_that_still_starts_is_told_so_and_the_next_one_is_taken(tmp_path: Path) -> None:
    def not_open(sending: object) -> None:
        raise EngineClosed("use the engine inside its `async with` block")

    async with rig(tmp_path) as engine, connected(engine) as trainer:
        taken = engine.link._on_offer
        engine.link._on_offer = not_open
        with pytest.raises(NotServing, match="still starting"):
            await settled(trainer.publish(weights(1), weight_version=1), 5)
        engine.link._on_offer = taken
        handle = trainer.publish(weights(1), weight_version=1)
        await engine.refit(await engine.offer(), [Worker()])
        assert (await settled(handle)).outcome is Outcome.COMMITTED
        engine.link._on_offer = not_open
        with pytest.raises(EngineClosed, match="being closed"):
            await settled(trainer.publish(weights(2), weight_version=2), 5)
