"""The trainer's side: publish weights to a running engine, from any process on its host.

    with Publisher.connect(address) as publisher:
        handle = publisher.publish(model.named_parameters(), weight_version=7)
        handle.sent.wait()                    # the optimizer may step again
        report = handle.result(timeout=60)

One background thread owns the link: it packs, beats while it does, and ends every handle, whatever happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Literal, Self
from uuid import uuid4

from pitstop.engine.errors import (
    EngineClosed,
    LocalError,
    PeerLost,
    PitstopError,
    ProtocolViolation,
    WorkerFailed,
)
from pitstop.engine.ports import Guarded, Observer, Scalar, Work, default_observer
from pitstop.engine.worker_ports import Offer
from pitstop.transports.codec import fault, raised, words
from pitstop.transports.deadline import BEAT_S, Limit
from pitstop.transports.digest import prepare
from pitstop.transports.messages import (
    Accept,
    Bye,
    Cancel,
    Faulted,
    FromEngine,
    Refuse,
    Sent,
    Settled,
    Welcome,
)
from pitstop.transports.negotiation import negotiate
from pitstop.transports.packing import checked
from pitstop.transports.publish_handle import PublishHandle
from pitstop.transports.reports import accepted, judge, propose, reported
from pitstop.transports.segment import Kept
from pitstop.transports.sources import Publishable, source_of
from pitstop.transports.zmq_link import Line

_LOG: Final = logging.getLogger(__name__)
_FAREWELL_S: Final = 1.0


class Publisher:
    """A connection to one run of an engine. Thread-safe. Make one with `connect`.

    When the engine dies, closes, or says nothing for too long, open handles fail with `PeerLost` and this publisher is
    over: connect anew.

    Attributes:
        transport: how weights travel, as negotiated.
        weight_version: what the engine served when it was connected to; None if nothing yet.
    """

    def __init__(self, line: Line, welcome: Welcome, transport: str, observer: Observer | None) -> None:
        self.transport: Final = transport
        self.weight_version: Final = welcome.weight_version
        self._pid = os.getpid()
        self._line = line
        self._observer = default_observer() if observer is None else Guarded(observer)
        self._kept = Kept("write")
        self._handles: dict[str, PublishHandle] = {}
        self._new: deque[PublishHandle] = deque()
        self._accepted: deque[Accept] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._lost: PitstopError | None = None
        self._thread = threading.Thread(target=self._run, name="pitstop-publisher", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, address: str, *, timeout: float = 10.0, observer: Observer | None = None) -> Publisher:
        """Connect to the engine at `address`, as its `address` attribute says, within `timeout` seconds.

        `observer` is told about every send; by default the one that telemetry's set-up installed.

        Raises:
            PeerLost: no engine answers there.
            LocalError: not an address, or the engine's memory cannot be shared from here; says why.
            ProtocolViolation: the engine speaks another version of the protocol.
        """
        line = Line(address)
        try:
            welcome = line.greet("trainer", Limit(timeout))
            transport = negotiate(welcome, address)
        except BaseException:
            line.close()
            raise
        _LOG.info("connected to run %s at %s: weights travel by %s", welcome.run_id, address, transport)
        return cls(line, welcome, transport, observer)

    def publish(
        self,
        what: Publishable,
        *,
        weight_version: int,
        cast: Literal["inventory"] | None = None,
        policy: str | None = None,
        deadlines: Mapping[str, float] | None = None,
        headers: Mapping[str, str] | None = None,
        rebase: bool = False,
    ) -> PublishHandle:
        """Offer weights as `weight_version`; return at once.

        What is published (named tensors, a mapping, a module, or a checkpoint's path) must stay unchanged until
        `handle.sent` is set. Several may be under way: the engine takes the latest. `cast="inventory"` casts
        floating-point tensors to the dtypes of the engine's checkpoint. `policy` is what becomes of requests in
        flight (keep, recompute, wait, abort), `deadlines` are limits of this refit in seconds (suspend, drain,
        receive, receive_per_gib, finalize, resume, control, silence); the engine's own count where unset.
        `headers` are the W3C context that the send belongs to. A trainer that has begun its count of versions anew
        says so with `rebase=True`, once: the version need not be above the committed one (else `StaleVersion` is what
        the handle raises), and later versions are counted from it.

        Raises:
            OfferRejected, CheckpointUnreadable: it cannot be read; names the tensor or the file.
            InvalidRequest, UnsupportedPolicy: an argument that cannot be.
            EngineClosed: the publisher is closed.
            PeerLost: the engine is gone.
        """
        wishes = dict(deadlines or {})
        judge(weight_version, cast, policy, wishes)
        source = source_of(what)
        try:
            offer = Offer(uuid4().hex[:16], weight_version, source.specs(), cast, None, dict(headers or {}))
            handle = PublishHandle(offer, source, policy, wishes, rebase=rebase)
            with self._lock:
                self._must_be_open()
                self._open(handle)
                self._handles[offer.refit_id] = handle
                self._new.append(handle)
        except BaseException:
            source.close()
            raise
        self._line.wake()
        return handle

    def close(self) -> None:
        """Close the link. Handles that have not ended fail with `EngineClosed`. Takes a few seconds at most."""
        with self._lock:
            self._closing = True
        self._line.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the background thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        ended: PitstopError = EngineClosed("the publisher was closed before the refit ended")
        try:
            prepare()
            while not self._closing:
                self._serve(BEAT_S)
                if self._accepted:
                    self._send(self._accepted.popleft())
        except PitstopError as error:
            ended = error
        except Exception as error:  # noqa: BLE001 - handles must end, whatever it was
            ended = WorkerFailed(f"the publisher's thread failed: {error!r}", operation="publish")
            _LOG.exception("the publisher's thread failed")
        finally:
            with self._lock:
                self._lost = ended
                handles = list(self._handles.values())
            for handle in handles:
                self._over(handle, error=ended)
            with contextlib.suppress(PitstopError):
                self._farewell()
            self._line.close()

    def _serve(self, seconds: float) -> None:
        """Say what there is to say, hear what the engine says."""
        while self._new:
            handle = self._new.popleft()
            try:
                self._line.send(propose(handle.offer, handle.policy, handle.deadlines, rebase=handle.rebase))
            except ProtocolViolation as error:
                self._over(handle, error=error)
        for message in self._line.pump(seconds):
            self._hear(message)
        if self._handles:
            limits = [h.deadlines["silence"] for h in self._handles.values() if "silence" in h.deadlines]
            self._line.silence.check(self._line.peer, seconds=min(limits, default=self._line.silence.seconds))

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Accept):
            self._accepted.append(message)
            return
        if isinstance(message, Refuse) and not message.refit_id:
            raise raised(message.error)
        if not isinstance(message, Settled | Refuse | Cancel):
            raise ProtocolViolation(f"{type(message).__name__} to a trainer", peer=self._line.peer)
        handle = self._handles.get(message.refit_id)
        if handle is None:
            return
        if isinstance(message, Settled):
            self._over(handle, settled=message)
        elif isinstance(message, Refuse):
            self._over(handle, error=raised(message.error))
        else:
            handle.cancelled = raised(message.error)

    def _send(self, message: Accept) -> None:
        """Pack, beating between two pieces of work; a `Cancel` that comes meanwhile ends it."""
        refit_id = message.refit_id
        handle = self._handles.get(refit_id)
        try:
            if handle is None:
                raise PeerLost("nobody waits for this refit any more", peer="trainer")  # noqa: TRY301
            digests = self._packed(handle, message)
        except PitstopError as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - a source may fail in any way, and the engine has to know
            failed = WorkerFailed(f"reading the source failed: {error!r}", operation="send", kind=type(error).__name__)
        else:
            self._line.send(Sent(refit_id, digests))
            if handle.released():
                self._closed(handle, None)
            return
        if isinstance(failed, PeerLost) and self._line.gone:
            raise failed
        self._line.send(Faulted(refit_id, fault(failed)))
        if handle is not None and handle.released():
            self._closed(handle, failed)

    def _packed(self, handle: PublishHandle, message: Accept) -> bytes:
        import numpy as np

        source = handle.source
        if source is None:
            raise PeerLost("the source is free already", peer="trainer")
        slots = accepted(message)
        checked(handle.offer.tensors, slots, message.nbytes)
        mapping = self._kept.take(self._line.address, message.buffer, message.nbytes)
        digests = np.zeros(len(slots), np.uint64)
        for _ in source.pack(slots, mapping, digests):
            self._serve(0.0)
            if handle.cancelled is not None:
                raise handle.cancelled
            if self._closing or handle.done():
                raise EngineClosed("the publisher gave this refit up")
        return words(digests.tolist())

    def _farewell(self) -> None:
        self._line.send(Bye())
        limit = Limit(_FAREWELL_S)
        while limit.left():
            self._line.pump(limit.left())  # raises when the engine answers with its own Bye

    def _must_be_open(self) -> None:
        if os.getpid() != self._pid:
            raise LocalError("this publisher was made before a fork: connect anew in this process")
        if self._closing:
            raise EngineClosed("the publisher is closed")
        if self._lost is not None:
            raise self._lost

    # -- handles -----------------------------------------------------------------------------------------

    def _open(self, handle: PublishHandle) -> None:
        offer = handle.offer
        detail: dict[str, Scalar] = {
            "refit_id": offer.refit_id, "weight_version": offer.weight_version, "bytes": offer.nbytes,
            "tensors": len(offer.tensors), "transport": self.transport,
        }  # fmt: skip
        work = Work("send_weights", handle.key, time.time_ns(), headers=offer.headers, detail=detail)
        handle.propagate(self._observer.opened(work))

    def _closed(self, handle: PublishHandle, error: PitstopError | None) -> None:
        self._observer.closed(handle.key, time.time_ns(), None if error is None else error.slug)

    def _over(
        self, handle: PublishHandle, *, settled: Settled | None = None, error: PitstopError | None = None
    ) -> None:
        with self._lock:
            self._handles.pop(handle.offer.refit_id, None)
        report = None
        if settled is not None:
            try:
                report = reported(settled)
            except ProtocolViolation as wrong:
                error = wrong
        if handle.released():
            self._closed(handle, error or (report.error if report is not None else None))
        handle.end(report, error)
