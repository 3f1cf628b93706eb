"""An engine started the way users start it: spawned, with a worker process of its own; and no process left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from pitstop.engine.vllm_backend.processes import descendants, ended, hold
from tests.conftest import Checkpoint
from tests.vllm.conftest import Garage


@pytest.mark.parametrize("end", ["killed", "closed"])
async def test_a_spawned_engine_answers_like_a_forked_one_and_ends_with_its_owner(
    garage: Garage, checkpoint: Checkpoint, end: str
) -> None:
    script = Path(__file__).with_name("user_script.py")
    shared = set(os.listdir("/dev/shm"))
    user = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(checkpoint()), stdin=PIPE, stdout=PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert user.stdin is not None
    assert user.stdout is not None
    said = {}
    async for line in user.stdout:
        if line.startswith(b"{"):
            said = json.loads(line)
            break
    pidfds = [pidfd for pid in descendants(user.pid) if (pidfd := hold(pid)) is not None]
    assert said["ranks"] == 1
    assert len(pidfds) >= 2
    if end == "killed":
        user.send_signal(signal.SIGKILL)
    else:
        user.stdin.close()
    await user.wait()
    assert await asyncio.to_thread(ended, pidfds, 10)
    assert set(os.listdir("/dev/shm")) <= shared
    for pidfd in pidfds:
        os.close(pidfd)
    live = await garage.start()
    assert said["made"] == (await live.run()).token_ids
