"""What a sink does when its receiver's thread and its worker's are at it at once. The reload is a stand-in."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from pitstop.engine.errors import DeadlineExceeded, MissingTensors, PeerLost, ProtocolViolation
from pitstop.engine.vllm_backend.sink import LoadingSink
from pitstop.engine.worker_ports import Bucket, Placed, TensorSpec, Ticket, Ways

A, B, HEAD = (TensorSpec(name, "float32", (1,)) for name in ("a", "b", "head"))


class Slow:
    """Notes what is asked of it, sees calls that overlap, and loads until it is let go."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.overlaps = 0
        self.loading, self.go = threading.Event(), threading.Event()
        self.go.set()
        self._inside = 0

    def _do(self, what: str) -> None:
        self._inside += 1
        self.overlaps += self._inside > 1
        self.did.append(what)
        if what.startswith(("feed", "ready")):
            self.loading.set()
            assert self.go.wait(5)
        self._inside -= 1

    def ready(self, tensors: Any) -> None:
        self._do("ready " + " ".join(spec.name for spec, _ in tensors))

    def forget(self) -> None:
        self._do("forget")

    def ways(self) -> Ways:
        return Ways()

    def places(self, tensors: Any) -> dict[str, Any]:
        return {spec.name: spec.name.upper() for spec in tensors}

    def begin(self) -> None:
        self._do("begin")

    def feed(self, tensors: Any) -> None:
        self._do("feed " + " ".join(spec.name for spec, _ in tensors))

    def complete(self) -> None:
        self._do("complete")

    def finish(self) -> None:
        self._do("finish")

    def undo(self) -> None:
        self._do("undo")


def sink(reload: Slow, busy: threading.Lock, *specs: TensorSpec, in_place: bool = True) -> LoadingSink:
    placed = tuple(Placed(spec, 0) for spec in specs)
    ticket = Ticket("r", "replica-0", 1, 0, "", "", 0, placed, "", "", 1.0, 0.05, in_place=in_place)
    return LoadingSink(ticket, reload, {"head": "a"}, busy)


def bucket(*specs: TensorSpec) -> Bucket:
    return Bucket("r", [(spec, None) for spec in specs])  # type: ignore[misc]


def test_the_model_is_opened_once_and_touched_from_then_on() -> None:
    reload = Slow()
    made = sink(reload, threading.Lock(), A, B, HEAD)
    assert not made.touched
    for spec in (HEAD, B, A):
        made.landed(bucket(spec))
        assert made.touched
    made.apply()
    made.finalize()
    made.release()
    assert reload.did == ["begin", "feed a", "feed b", "feed ", "complete", "finish", "forget"]


def test_staged_tensors_touch_nothing_until_they_are_applied() -> None:
    reload = Slow()
    made = sink(reload, threading.Lock(), A, B, in_place=False)
    made.landed(bucket(B))
    with pytest.raises(MissingTensors, match="a"):
        made.apply()
    made.landed(bucket(A))
    assert (made.touched, reload.did) == (False, ["ready a b"])
    made.apply()
    assert (made.touched, reload.did) == (True, ["ready a b", "begin", "feed a b", "complete"])


def test_what_lands_twice_or_uncalled_for_is_refused() -> None:
    made = sink(Slow(), threading.Lock(), A)
    made.landed(bucket(A))
    for spec in (A, B):
        with pytest.raises(ProtocolViolation, match=spec.name):
            made.landed(bucket(spec))


@pytest.mark.parametrize("verb", ["undo", "release"])
def test_a_load_that_outlives_the_workers_patience_undoes_itself(verb: str) -> None:
    reload, busy = Slow(), threading.Lock()
    made = sink(reload, busy, A, B)
    reload.go.clear()
    receiver = threading.Thread(target=made.landed, args=[bucket(A)])
    receiver.start()
    assert reload.loading.wait(5)
    if verb == "undo":
        with pytest.raises(DeadlineExceeded, match="still loading"):
            made.undo()
    else:
        made.release()
    assert "undo" not in reload.did
    later = threading.Thread(target=sink(reload, busy, B).landed, args=[bucket(B)])
    later.start()
    reload.go.set()
    for thread in (receiver, later):
        thread.join(5)
    assert reload.did == ["begin", "feed a", "undo", "begin", "feed b"]
    made.landed(bucket(B))
    assert reload.did == ["begin", "feed a", "undo", "begin", "feed b"]
    assert not reload.overlaps


@pytest.mark.parametrize("verb", ["undo", "release"])
def test_what_becomes_ready_after_a_refit_was_given_up_is_dropped(verb: str) -> None:
    reload = Slow()
    made = sink(reload, threading.Lock(), A, B, in_place=False)
    reload.go.clear()
    receiver = threading.Thread(target=made.landed, args=[bucket(A, B)])
    receiver.start()
    assert reload.loading.wait(5)
    with pytest.raises(DeadlineExceeded) if verb == "undo" else contextlib.nullcontext():
        getattr(made, verb)()
    reload.go.set()
    receiver.join(5)
    assert reload.did == ["ready a b", "forget"]
    assert not made._kept
    assert not made._chosen


def test_an_undo_waits_for_the_load_that_runs() -> None:
    reload = Slow()
    made = sink(reload, threading.Lock(), A)
    reload.go.clear()
    receiver = threading.Thread(target=made.landed, args=[bucket(A)])
    receiver.start()
    assert reload.loading.wait(5)
    threading.Timer(0.01, reload.go.set).start()
    made.undo()
    receiver.join(5)
    assert (reload.did[:2], set(reload.did[2:]), reload.overlaps) == (["begin", "feed a"], {"undo"}, 0)


def test_a_group_that_fails_closes_the_model_and_ends_the_refit() -> None:
    reload = Slow()
    made = sink(reload, threading.Lock(), A, B)
    reload.feed = lambda tensors: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(ZeroDivisionError):
        made.landed(bucket(A))
    assert (made.touched, reload.did) == (True, ["begin", "undo"])
    # Whoever writes to places beside it hears the same, and not only that it was given up.
    with pytest.raises(ZeroDivisionError):
        made.hold()
    made.landed(bucket(B))
    with pytest.raises(ProtocolViolation, match="given up"):
        made.apply()


def test_only_what_comes_in_place_and_alone_has_a_place() -> None:
    made = sink(Slow(), threading.Lock(), A, B)
    assert made.places() == {"a": "A", "b": "B"}
    # Of two tied tensors one is loaded, whichever comes first; one alone has the other's place.
    assert sink(Slow(), threading.Lock(), A, B, HEAD).places() == {"b": "B"}
    assert sink(Slow(), threading.Lock(), B, HEAD).places() == {"b": "B", "head": "A"}
    assert sink(Slow(), threading.Lock(), A, in_place=False).places() == {}
    assert not made.touched


def test_who_holds_the_live_parameters_has_opened_them_and_has_them_alone() -> None:
    reload, busy = Slow(), threading.Lock()
    made = sink(reload, busy, A, B)
    with busy:
        assert not made.hold()
    assert not made.touched
    for _ in range(2):
        assert made.hold()
        assert not sink(reload, busy, B).hold()
        made.let_go()
    assert (made.touched, reload.did) == (True, ["begin"])


@pytest.mark.parametrize("verb", ["undo", "release"])
def test_what_is_given_up_while_it_is_written_to_is_undone_by_the_writer_who_writes_no_more(verb: str) -> None:
    reload = Slow()
    made = sink(reload, threading.Lock(), A, B)
    assert made.hold()
    with pytest.raises(DeadlineExceeded) if verb == "undo" else contextlib.nullcontext():
        getattr(made, verb)()
    assert reload.did == ["begin"]
    made.let_go()
    assert reload.did == ["begin", "undo"]
    with pytest.raises(PeerLost, match="given up"):
        made.hold()
    assert reload.did == ["begin", "undo"]


def test_a_model_that_cannot_be_opened_is_closed_and_nobody_waits_for_it() -> None:
    reload, busy = Slow(), threading.Lock()
    made = sink(reload, busy, A)
    reload.begin = lambda: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(ZeroDivisionError):
        made.hold()
    assert (made.touched, reload.did, busy.locked()) == (True, ["undo"], False)
