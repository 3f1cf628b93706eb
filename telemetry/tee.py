"""Several observers as one: each is told everything, none can hurt another or the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pitstop.engine.ports import Observer, Scalar, Transition, Work
from pitstop.telemetry.spans import Drop


class Tee:
    """Passes on to `observers`. What one raises is dropped and counted."""

    def __init__(self, *observers: Observer, dropped: Drop = lambda signal, reason: None) -> None:
        self.observers = observers
        self._dropped = dropped

    def transition(self, change: Transition) -> None:
        """Pass on."""
        self._each(lambda observer: observer.transition(change))

    def opened(self, work: Work) -> Mapping[str, str]:
        """Pass on; return the headers of the first observer that has some of its own."""
        answer = work.headers
        for observer in self.observers:
            try:
                headers = observer.opened(work)
            except Exception:  # noqa: BLE001
                self._dropped("observer", "raised")
            else:
                if answer is work.headers:
                    answer = headers
        return answer

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """Pass on."""
        self._each(lambda observer: observer.closed(key, at, error, detail))

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        """Pass on."""
        self._each(lambda observer: observer.counted(name, value, detail))

    def _each(self, tell: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                tell(observer)
            except Exception:  # noqa: BLE001
                self._dropped("observer", "raised")
