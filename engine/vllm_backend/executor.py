"""The executors of our engines. Imported by vLLM, by name, in the engine core's process too.

A core is handed its executor's class when it is started, so this module is the first of ours that it imports, before it
waits for its frontend: the watch has to begin here, or a core whose frontend dies that early would wait for minutes.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from pitstop.engine.vllm_backend.watch import start_watch

start_watch()


class InCoreExecutor(UniProcExecutor):
    """Runs the worker in the engine core's process."""


class WatchedMultiprocExecutor(MultiprocExecutor):
    """Runs each worker in a process of its own."""


class WatchedUniProcExecutor(UniProcExecutor):
    """Runs the worker in the engine core's process."""


def watched(executor: type[Any]) -> type[Any]:
    """Return the executor that does the same and brings the watch with it."""
    ours: dict[type[Any], type[Any]] = {
        MultiprocExecutor: WatchedMultiprocExecutor,
        UniProcExecutor: WatchedUniProcExecutor,
    }
    return ours.get(executor, executor)


def without_dunders() -> None:
    """Keep llvmlite's library object from answering for `__dict__`.

    vLLM's CPU platform looks through the `__dict__` of whatever any module holds, and that object makes a C function
    up for every name. A core or worker that is forked from a process with numba in it would fail to start.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    wrapper: Any = getattr(ffi, "_lib_wrapper", None)
    if wrapper is None or getattr(wrapper.__getattr__, "pitstop", False):
        return
    answer = wrapper.__getattr__

    def guarded(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    guarded.pitstop = True  # type: ignore[attr-defined]
    wrapper.__getattr__ = guarded
