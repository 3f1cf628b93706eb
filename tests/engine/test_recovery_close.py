"""An engine that is closed while somebody waits for a recovery."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio
from pitstop.engine.errors import EngineClosed
from tests.engine.sim import fleet

async def main():
    engine = fleet(2)
    await engine.__aenter__()
    engine.sims[1].script.plan("apply", "raise")
    await engine.refit_to(1)
    engine.transport.script.plan("land", "hang")
    engine.transport.script.plan("land", "hang")
    running = engine.refit_to(2)
    await asyncio.sleep(0.1)
    recovering = asyncio.create_task(engine.recover())
    await asyncio.sleep(0.1)
    assert engine._coordinator.busy
    await engine.aclose()
    for task in (running, recovering):
        try:
            await task
        except EngineClosed:
            print("closed")
asyncio.run(main())
"""


def test_closing_an_engine_ends_a_recovery_that_waits_for_a_refit() -> None:
    # In a process of its own: a loop that spins cannot be stopped from within.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.split() == ["closed", "closed"], done.stderr
