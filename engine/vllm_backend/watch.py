"""The parent-death watch of engine processes: none of them outlives the process that started the engine.

vLLM's engine core waits on a socket for ever once its frontend was killed, and its workers follow the core only.
"""

from __future__ import annotations

import os
import select
import threading
from typing import Any

from pitstop.engine.vllm_backend.processes import hold, kill, lineage

FRONTEND = "PITSTOP_FRONTEND_PID"
"""Environment variable with the pid of the process that started the engine. Children inherit it."""

_watching: set[int] = set()


class Carried(dict[str, Any]):
    """What goes into an engine's configuration, and starts the watch wherever a copy of it is unpacked.

    A core takes its configuration out of its parent's hands before it does anything else; then it waits for its
    frontend, without a limit, and long before it imports a worker.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (dict(self),)


def _arrived(content: dict[str, Any]) -> Carried:
    if start_watch():
        # Here, and not in the environment that the process is started with: that is the whole frontend's, whose other
        # engines start at the same time. Nothing has looked for a GPU yet.
        os.environ.update(content.get("environment", {}))
    return Carried(content)


def start_watch() -> bool:
    """Start the watch in this engine process, once. False where there is no frontend to watch."""
    frontend = int(os.environ.get(FRONTEND, "0"))
    if not frontend or frontend == os.getpid():
        return False
    if os.getpid() in _watching:
        return True
    _watching.add(os.getpid())
    between = lineage(frontend)
    if between is None:
        # Orphaned between its start and now.
        os._exit(1)
    held = [(pid, hold(pid)) for pid in (frontend, *between)]
    if any(pidfd is None for _, pidfd in held) or lineage(frontend) != between:
        os._exit(1)
    pidfds = [pidfd for _, pidfd in held if pidfd is not None]
    threading.Thread(target=_end_with, args=(pidfds,), daemon=True, name="pitstop-parent-watch").start()
    return True


def _end_with(pidfds: list[int]) -> None:
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    poller.poll()
    # The core, between the frontend and a worker, has no watch of its own where it is not a worker itself.
    for pidfd in pidfds[1:]:
        kill(pidfd)
    os._exit(1)
