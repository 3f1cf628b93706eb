"""The executor of engines that are started by fork. Imported by vLLM, by name."""

from __future__ import annotations

import sys
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InCoreExecutor(UniProcExecutor):
    """Runs the worker in the engine core's process."""


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
