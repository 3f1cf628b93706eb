from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pitstop.engine.ports import NullObserver, Work
from pitstop.telemetry.tee import Tee
from tests.telemetry.builders import P, Recorder, change, generate, refit_work


class Broken:
    """Raises at everything."""

    def transition(self, change: object) -> None:
        raise RuntimeError

    def opened(self, work: Work) -> Mapping[str, str]:
        raise RuntimeError

    def closed(self, key: str, at: int, error: str | None = None, detail: object = None) -> None:
        raise RuntimeError

    def counted(self, name: str, value: float, detail: object = None) -> None:
        raise RuntimeError


def test_an_observer_that_raises_hurts_no_other_and_is_counted() -> None:
    dropped: Counter[tuple[str, str]] = Counter()
    recorder = Recorder()

    def drop(signal: str, reason: str) -> None:
        dropped[signal, reason] += 1

    tee = Tee(Broken(), recorder.observer(), Broken(), dropped=drop)
    headers = tee.opened(refit_work("r", 1))
    tee.transition(change(P.STARTING, "BootedEmpty", P.IDLE, 2))
    tee.counted("rl.staleness", 1)
    tee.closed("refit:r", 3)
    assert "traceparent" in headers
    assert len(recorder.ended) == 1
    assert dropped == {("observer", "raised"): 8}


def test_headers_come_from_the_observer_that_has_some_else_from_the_caller() -> None:
    work = generate("q", 1, {"x": "y"})
    spans = Recorder().observer(level=2, sample=1.0)
    assert "traceparent" in Tee(NullObserver(), spans, NullObserver()).opened(work)
    assert Tee(NullObserver()).opened(work) is work.headers
    assert Tee().opened(work) is work.headers
