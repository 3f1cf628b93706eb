"""The receiving end in a worker process: attach, wait for the trailer, prove every byte, hand over, let go."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from threading import Event, Lock
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from pitstop.engine.errors import DigestMismatch, PeerLost, PitstopError, ProtocolViolation, WorkerFailed
from pitstop.engine.worker_ports import Bucket, Placed, Ticket, WeightSink
from pitstop.transports.codec import fault, numbers, raised
from pitstop.transports.deadline import BEAT_S, Limit
from pitstop.transports.digest import prepare
from pitstop.transports.messages import Cancel, FromClient, FromEngine, LetGo, Noted, Refuse, Report, Seal
from pitstop.transports.packing import Proof
from pitstop.transports.segment import Kept, Mapping
from pitstop.transports.zmq_link import Line

_FAREWELL_S: Final = 1.0

_kept = Kept("read")
_proofs: WeakKeyDictionary[Mapping, tuple[tuple[Placed, ...], Proof]] = WeakKeyDictionary()
_proving = Lock()


class LinkedReceiver(ABC):
    """A receiver and its line to the engine: beats, hears, and says how it ended. `run` in a thread.

    Subclasses receive in `_receive`, calling `_listen` every few milliseconds, and set `_holds` before the sink gets
    to see what may lie in the transport's buffer.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._holds = False
        self._line: Line | None = None
        self._seal: tuple[int, ...] | None = None
        self._aborted = Event()
        self._ended = Event()
        self._closing = Lock()
        self._closed = False

    def run(self, sink: WeightSink) -> None:
        """See `Receiver.run`. Errors are reported on the back-channel; none is raised."""
        ticket, began, error = self._ticket, monotonic(), None
        try:
            prepare()
            line = self._line = Line(ticket.address, ticket.silence_s)
            line.greet("receiver", Limit(ticket.silence_s), ticket.token)
            self._receive(line, sink)
        except PitstopError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - the engine is told, whatever it was
            error = _translated(failure, ticket)
        nbytes = sum(placed.spec.nbytes for placed in ticket.tensors)
        if error is None:
            report = Report(ticket.refit_id, "landed", nbytes, monotonic() - began, holds=True)
        else:
            said, error = fault(error), None  # its frames would keep a version's memory until garbage is collected
            # First, and then it says so: who plans the next refit counts on that memory.
            kept = 0 if self._holds else self._free()
            report = Report(ticket.refit_id, "failed", kept, monotonic() - began, self._holds, said)
        self._say(report)
        with self._closing:
            self._ended.set()
            # Closed too soon, and the sink may hold what came too late: then nobody says that it has let go.
            if self._closed:
                self._free()
            if (report.kind == "failed" and not self._holds) or self._closed:
                self._hang_up()

    def abort(self) -> None:
        """See `Receiver.abort`."""
        self._aborted.set()
        if (line := self._line) is not None:
            line.wake()

    def close(self) -> None:
        """See `Receiver.close`. Ends `run` first if need be; waits at most a second or two."""
        self.abort()
        self._ended.wait(_FAREWELL_S)
        with self._closing:
            self._closed = True
            if self._ended.is_set():
                self._free()
            if self._ended.is_set() and self._line is not None:
                self._say(LetGo(self._ticket.refit_id))
                self._hang_up()

    @abstractmethod
    def _free(self) -> int:
        """Let go of what was received into, to which nothing refers; return how much of it is kept. Idempotent."""

    @abstractmethod
    def _receive(self, line: Line, sink: WeightSink) -> None:
        """Receive, prove, hand over; raise what keeps it from that."""

    def _trailer(self, line: Line, limit: Limit) -> tuple[int, ...]:
        while self._seal is None:
            self._listen(line, limit, BEAT_S)
        return self._seal

    def _listen(self, line: Line, limit: Limit, seconds: float) -> None:
        """Beat, hear what the engine says, and raise if there is no point in going on."""
        for message in line.pump(min(seconds, limit.left())):
            if isinstance(message, Cancel | Refuse):
                raise raised(message.error)
            if getattr(message, "refit_id", "") != self._ticket.refit_id or not self._heard(message):
                raise ProtocolViolation(f"{type(message).__name__} to a receiver of {self._ticket.refit_id}")
        if self._aborted.is_set():
            raise PeerLost("the worker was told to give this refit up", peer="worker")
        line.silence.check(line.peer)
        limit.check("receiving", phase="receive", peer="trainer", replica=self._ticket.replica, rank=self._ticket.rank)

    def _heard(self, message: FromEngine) -> bool:
        """Take a message of this refit in; False if it may not be."""
        if not isinstance(message, Seal) or self._seal is not None:
            return False
        self._seal = numbers(message.digests)
        return True

    def _say(self, message: FromClient) -> None:
        """Say something that matters, and stay until it has been heard: the socket does not linger."""
        if (line := self._line) is None:
            return
        limit = Limit(_FAREWELL_S)
        try:
            line.send(message)
            while limit.left():
                if any(isinstance(answer, Noted | Refuse) for answer in line.pump(limit.left())):
                    return
        except PitstopError:
            return

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


class SegmentReceiver(LinkedReceiver):
    """Implements `worker_ports.Receiver` where a version lies in the buffer as a whole.

    The mapping stays with the process when `close` is done, for the next refit: mapping a gibibyte anew takes a
    tenth of a second. What the sink was given are views of it, valid until `close`.
    """

    def _free(self) -> int:
        """Do nothing: the mapping that is kept is of the engine's memory."""
        return 0

    def _receive(self, line: Line, sink: WeightSink) -> None:
        ticket = self._ticket
        mapping = _kept.take(ticket.address, ticket.buffer, ticket.nbytes)
        line.send(Report(ticket.refit_id, "attached"))
        limit = Limit(ticket.receive_s)
        # While the trainer still writes: ten thousand views take longer to make than to prove.
        bucket = self._views(mapping)
        proven = self._prove(line, mapping, self._trailer(line, limit), limit)
        if proven is not mapping:
            bucket = self._views(proven)
        self._listen(line, limit, 0.0)
        self._holds = True
        sink.landed(bucket)

    def _views(self, mapping: Mapping) -> Bucket:
        tensors = [(p.spec, mapping.tensor(p.spec.dtype, p.spec.shape, p.offset)) for p in self._ticket.tensors]
        _proof(mapping, self._ticket.tensors)
        return Bucket(self._ticket.refit_id, tensors)

    def _prove(self, line: Line, mapping: Mapping, digests: tuple[int, ...], limit: Limit) -> Mapping:
        try:
            self._differing(line, mapping, digests, limit)
        except DigestMismatch:
            # A page that somebody in this process wrote to is ours alone and no longer shows what the trainer writes:
            # a look through a new mapping tells that from damage.
            mapping = _kept.take(self._ticket.address, self._ticket.buffer, self._ticket.nbytes, fresh=True)
            self._differing(line, mapping, digests, limit)
        return mapping

    def _differing(self, line: Line, mapping: Mapping, digests: tuple[int, ...], limit: Limit) -> None:
        while not _proving.acquire(timeout=BEAT_S):
            self._listen(line, limit, 0.0)
        try:
            for _ in _proof(mapping, self._ticket.tensors).differing(digests):
                self._listen(line, limit, 0.0)
        finally:
            _proving.release()


def _proof(mapping: Mapping, placed: tuple[Placed, ...]) -> Proof:
    known = _proofs.get(mapping)
    if known is None or known[0] != placed:
        _proofs[mapping] = known = (placed, Proof(placed, mapping))
    return known[1]


def _translated(failure: Exception, ticket: Ticket) -> PitstopError:
    error = WorkerFailed(
        f"rank {ticket.rank} of {ticket.replica} failed to receive: {type(failure).__name__}: {failure}",
        replica=ticket.replica,
        rank=ticket.rank,
        operation="receive",
        kind=type(failure).__name__,
    )
    error.remote_traceback = traceback.format_exc()
    return error
