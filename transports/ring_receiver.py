"""The receiving end of a ring in a worker process: take each bucket out, say so, prove the whole by the trailer.

A slot is said to be drained when its bytes are in memory of the engine's, never sooner; so a receiver that sleeps
between two reads can hold the trainer up, but never sees what belongs to another bucket.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

from pitstop.engine.errors import DigestMismatch
from pitstop.engine.worker_ports import Bucket, Ticket, WeightSink
from pitstop.transports.aside import aside
from pitstop.transports.deadline import BEAT_S, Limit
from pitstop.transports.draining import Drainer, HostDrainer, proven
from pitstop.transports.lent_draining import forget_lent, lent_drainer, prepare_device
from pitstop.transports.messages import Drained, Filled, FromEngine, Lend, Report
from pitstop.transports.receiver import LinkedReceiver
from pitstop.transports.segment import Kept
from pitstop.transports.zmq_link import Line

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_AHEAD: Final = 2  # groups of tensors that wait for the sink while the next one is taken out
_SOON_S: Final = 0.005

_kept = Kept("read")


class RingReceiver(LinkedReceiver):
    """Implements `worker_ports.Receiver` where a version comes in buckets."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket)
        self._filled = 0
        self._lend: Lend | None = None
        self._drainer: Drainer | None = None

    @staticmethod
    def prepare(device: str) -> None:
        """Compile now what the first refit on a device would wait for."""
        prepare_device(device)

    def _free(self) -> int:
        drainer, self._drainer = self._drainer, None
        return 0 if drainer is None else drainer.close()

    def _receive(self, line: Line, sink: WeightSink) -> None:
        loading = _Loading(sink, line.wake) if self._ticket.in_place else None
        try:
            drainer = self._drain(line, sink, loading)
        except Exception as error:
            if isinstance(error, DigestMismatch):
                # A page that somebody in this process wrote to would show what it shows now for ever.
                _kept.drop(self._ticket.address)
            if self._ticket.device:
                forget_lent(self._ticket.address)
            raise
        finally:
            if loading is not None:
                loading.close()
        if loading is None:
            self._holds = True
            sink.landed(Bucket(self._ticket.refit_id, drainer.complete()))

    def _drain(self, line: Line, sink: WeightSink, loading: _Loading | None) -> Drainer:
        ticket = self._ticket
        limit = Limit(ticket.receive_s)
        live: dict[str, Tensor] = {}
        if ticket.in_place:
            # Aside: where there are thousands, each is a view that has to be made.
            live = self._meanwhile(line, limit, lambda: _places(ticket, sink))
        if ticket.device:
            line.send(Report(ticket.refit_id, "attached"))
            while (lend := self._lend) is None:
                self._listen(line, limit, BEAT_S)
            handle, nbytes = lend.handle, lend.nbytes
            drainer = self._made(line, limit, lambda: lent_drainer(ticket, handle, nbytes, live))
        else:
            mapping = _kept.take(ticket.address, ticket.buffer, ticket.nbytes)
            drainer = self._made(line, limit, lambda: HostDrainer(ticket, mapping, live))
            line.send(Report(ticket.refit_id, "attached"))
        done = 0
        while done < drainer.buckets:
            while self._filled <= done:
                self._listen(line, limit, BEAT_S)
            mine = self._writing(line, limit, sink) if live else contextlib.nullcontext()
            with mine, contextlib.closing(drainer.drain(done, self._filled)) as steps:
                for after in steps:
                    if after > done:
                        line.send(Drained(ticket.refit_id, after))
                    done = after
                    self._listen(line, limit, 0.0)
            if loading is not None and (whole := drainer.complete()):
                while not loading.take(Bucket(ticket.refit_id, whole)):
                    self._listen(line, limit, BEAT_S)
        digests = self._trailer(line, limit)
        proven([placed.spec for placed in ticket.tensors], drainer.digests(), digests)
        while loading is not None and not loading.done():
            self._listen(line, limit, BEAT_S)
        self._listen(line, limit, 0.0)
        return drainer

    @contextlib.contextmanager
    def _writing(self, line: Line, limit: Limit, sink: WeightSink) -> Iterator[None]:
        while not sink.hold():
            self._listen(line, limit, _SOON_S)
        try:
            yield
        finally:
            sink.let_go()

    def _made(self, line: Line, limit: Limit, make: Callable[[], Drainer]) -> Drainer:
        # Aside: where memory has to be made ready, or kernels are compiled only now, that takes longer than the engine
        # bears silence.
        self._drainer = drainer = self._meanwhile(line, limit, make, _unwanted)
        return drainer

    def _meanwhile(
        self, line: Line, limit: Limit, do: Callable[[], T], unwanted: Callable[[Future[T]], None] | None = None
    ) -> T:
        doing = aside(do, line.wake)
        try:
            while not doing.done():
                self._listen(line, limit, BEAT_S)
        except BaseException:
            if unwanted is not None:
                doing.add_done_callback(unwanted)
            raise
        return doing.result()

    def _heard(self, message: FromEngine) -> bool:
        if isinstance(message, Filled):
            self._filled = max(self._filled, message.buckets)
            return True
        if isinstance(message, Lend):
            fresh, self._lend = self._lend is None, message
            return fresh and bool(self._ticket.device)
        return super()._heard(message)


def _places(ticket: Ticket, sink: WeightSink) -> dict[str, Tensor]:
    """Return the live memory that this ring can be drained into: who copies reaches only his own kind."""
    import torch

    here = torch.device("cpu")
    if ticket.device:
        from pitstop.transports.cuda_memory import device_of

        here = device_of(ticket.device)
    return {name: place for name, place in sink.places().items() if place.device == here}


def _unwanted(making: Future[Drainer]) -> None:
    if making.exception() is None:
        making.result().close()


class _Loading:
    """Hands groups of tensors to the sink, in a thread: a load may take longer than the engine bears silence."""

    def __init__(self, sink: WeightSink, moved: Callable[[], None]) -> None:
        self._sink = sink
        self._moved = moved
        self._groups: queue.Queue[Bucket | None] = queue.Queue(_AHEAD)
        self._closed = False
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name="pitstop-load", daemon=True).start()

    def take(self, group: Bucket) -> bool:
        """Take a group over; False if others have to be loaded first. Raises what the sink has raised."""
        self._check()
        try:
            self._groups.put_nowait(group)
        except queue.Full:
            return False
        return True

    def done(self) -> bool:
        """Whether all is loaded. Raises what the sink has raised."""
        self._check()
        return not self._groups.unfinished_tasks

    def close(self) -> None:
        """Load nothing more."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # then there is something for it to wake up by
            self._groups.put_nowait(None)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (group := self._groups.get()) is not None and not self._closed:
            try:
                self._sink.landed(group)
            except Exception as failure:  # noqa: BLE001 - raised where the engine is told
                self._failure = failure
                self._moved()
                return
            del group
            self._groups.task_done()
            self._moved()
