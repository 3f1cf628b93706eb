"""An engine started the way users start it: spawned, with a worker process of its own; and no process left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from pitstop.engine.vllm_backend.processes import descendants, ended, hold, segments
from tests.conftest import Checkpoint
from tests.vllm.conftest import Garage


async def test_a_spawned_engine_answers_like_a_forked_one_and_ends_with_its_owner(
    garage: Garage, checkpoint: Checkpoint
) -> None:
    user = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("user_script.py")), str(checkpoint()), stdin=PIPE, stdout=PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert user.stdin is not None
    assert user.stdout is not None
    said = {}
    async for line in user.stdout:
        if line.startswith(b"{"):
            said = json.loads(line)
            break
    pids = descendants(user.pid)
    pidfds = [pidfd for pid in pids if (pidfd := hold(pid)) is not None]
    shared = segments(pids)
    assert said["ranks"] == 1
    assert len(pidfds) >= 2
    user.send_signal(signal.SIGKILL)
    await user.wait()
    assert await asyncio.to_thread(ended, pidfds, 10)
    assert not any(map(os.path.exists, shared))
    for pidfd in pidfds:
        os.close(pidfd)
    live = await garage.start()
    assert said["made"] == (await live.run()).token_ids
