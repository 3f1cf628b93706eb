"""Work that must not keep a thread from its peer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def aside(call: Callable[[], T], then: Callable[[], object] = lambda: None) -> Future[T]:
    """Call it in a thread of its own, which a process that ends does not wait for; `then` is called after it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)
        then()

    threading.Thread(target=run, name="pitstop-aside", daemon=True).start()
    return future
