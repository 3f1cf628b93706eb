"""The trainer's end of the control link: one background thread that owns it.

It packs, beats while it does, and ends every handle, whatever happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Final

from pitstop.engine.errors import EngineClosed, LocalError, PeerLost, PitstopError, ProtocolViolation, WorkerFailed
from pitstop.engine.ports import Observer
from pitstop.transports.aside import aside
from pitstop.transports.codec import fault, raised, words
from pitstop.transports.deadline import BEAT_S, Limit
from pitstop.transports.digest import prepare
from pitstop.transports.messages import (
    Accept,
    Bye,
    Cancel,
    Drained,
    Faulted,
    Filled,
    FromEngine,
    Join,
    Lend,
    Propose,
    Refuse,
    Sent,
    Settled,
)
from pitstop.transports.negotiation import connected
from pitstop.transports.packing import Slot, Source, checked
from pitstop.transports.pouring import Geometry, pour, pour_lent, prepare_lent
from pitstop.transports.publish_handle import PublishHandle
from pitstop.transports.reports import accepted, propose
from pitstop.transports.segment import Kept
from pitstop.transports.session import MOST_OPEN
from pitstop.transports.zmq_link import Rank

if TYPE_CHECKING:
    from pitstop.transports.cuda_memory import LentRing

_LOG: Final = logging.getLogger(__name__)
_FAREWELL_S: Final = 1.0
_RETRY_S: Final = 0.5
_KERNELS_S: Final = 60.0
"""Seconds after which a version is offered although its kernels are not there yet."""


class TrainerLink:
    """Connected to one engine at a time; to the next one at the same address if `reconnect`, within `timeout` seconds.

    Attributes:
        transport: how weights travel, as negotiated.
        weight_version: what the engine served when it was connected to; None if nothing yet.
    """

    def __init__(self, address: str, timeout: float, rank: Rank, *, reconnect: bool) -> None:
        self._address = address
        self._timeout = timeout
        self._reconnect = reconnect
        self._rank = rank
        self._count = 0
        self._connect(timeout)
        self._pid = os.getpid()
        self._kept = Kept("write")
        self._ring: LentRing | None = None
        self._handles: dict[str, PublishHandle] = {}
        self._new: deque[PublishHandle] = deque()
        self._accepted: deque[Accept] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._hurry = threading.Event()
        self._lost: PitstopError | None = None
        self.thread: Final = threading.Thread(target=self._run, name="pitstop-publisher", daemon=True)
        self.thread.start()

    @property
    def sends(self) -> bool:
        """Whether this is the rank that sends."""
        return not self._rank.rank

    def offer(self, handle: PublishHandle, observer: Observer) -> None:
        """Have the thread offer it.

        Raises:
            EngineClosed: the link was closed.
            PeerLost: the engine is gone.
            LocalError: the link was made before a fork.
        """
        with self._lock:
            self._must_be_open()
            if self._rank.rank:
                handle.released(None)
            else:
                handle.opened(observer, self.transport)
            if handle.offer.device:
                # Offered when its kernels are there: an engine that receives in place would wait for them, suspended.
                handle.kernels = aside(lambda: prepare_lent(handle.offer.device), self._line.wake)
            handle.number = self._count
            self._count += 1
            self._handles[handle.refit_id] = handle
            self._new.append(handle)
        self._line.wake()

    def close(self) -> None:
        """End everything. Takes a few seconds at most."""
        with self._lock:
            self._closing = True
        self._hurry.set()
        self._line.wake()
        if threading.current_thread() is not self.thread:
            self.thread.join(5.0)

    def abandon(self) -> None:
        """End it within a beat. Called while garbage is collected, so anywhere: takes no lock and wakes nobody."""
        self._closing = True

    def _run(self) -> None:
        ended: PitstopError = EngineClosed("the publisher was closed before the refit ended")
        try:
            prepare()
            while not self._closing:
                try:
                    self._serve(BEAT_S)
                    if self._accepted:
                        self._send(self._accepted.popleft())
                except PeerLost as lost:
                    if not self._reconnect:
                        again = f"{lost.message}; connect again, or connect with reconnect=True"
                        raise PeerLost(again, **lost.fields) from None
                    self._wait_for_another(lost)
        except PitstopError as error:
            ended = error
        except Exception as error:  # noqa: BLE001 - handles must end, whatever it was
            ended = WorkerFailed(f"the publisher's thread failed: {error!r}", operation="publish")
            _LOG.exception("the publisher's thread failed")
        finally:
            with self._lock:
                self._lost = ended
            for handle in self._open_handles():
                self._over(handle, ended)
            with contextlib.suppress(PitstopError):
                self._farewell()
            self._line.close()
            self._kept.drop(self._line.address)
            self._ring = None

    def _connect(self, seconds: float) -> None:
        self._line, welcome, self.transport = connected(self._address, seconds, self._rank)
        self.weight_version = welcome.weight_version
        _LOG.info("connected to run %s at %s: weights travel by %s", welcome.run_id, self._line.peer, self.transport)

    def _wait_for_another(self, lost: PeerLost) -> None:
        """Connect again; end what is open, and what is published meanwhile and waits too long."""
        _LOG.warning("%s; connecting again", lost)
        with contextlib.suppress(PitstopError):
            self._line.send(Bye())
        self._line.close()
        self._accepted.clear()
        for handle in self._open_handles():
            if handle.offered:
                self._over(handle, lost)
        while not self._closing:
            began = monotonic()
            with contextlib.suppress(PeerLost):
                self._connect(_RETRY_S)
                return
            late = PeerLost(f"{lost.message}, and has not come back in {self._timeout:g} s", **lost.fields)
            for handle in self._open_handles():
                if monotonic() - handle.since > self._timeout:
                    self._new.remove(handle)
                    self._over(handle, late)
            self._hurry.wait(max(0.0, _RETRY_S - (monotonic() - began)))

    def _open_handles(self) -> list[PublishHandle]:
        with self._lock:
            return list(self._handles.values())

    def _serve(self, seconds: float) -> None:
        """Say what there is to say, hear what the engine says."""
        # No more than the engine takes of one client: the rest waits here, in order, until some have ended.
        room = MOST_OPEN - sum(handle.offered for handle in self._open_handles()) if self._new else 0
        while self._new and room > 0 and _readable(self._new[0]):
            room -= 1
            handle = self._new.popleft()
            handle.offered = True
            try:
                self._line.send(self._opening(handle))
            except ProtocolViolation as error:
                self._over(handle, error)
        for message in self._line.pump(seconds):
            self._hear(message)
        if self._handles:
            limits = [h.deadlines["silence"] for h in self._handles.values() if "silence" in h.deadlines]
            self._line.silence.check(self._line.peer, seconds=min(limits, default=self._line.silence.seconds))

    def _opening(self, handle: PublishHandle) -> Propose | Join:
        offer, limits = handle.offer, handle.deadlines
        if not self._rank.rank:
            return propose(offer, handle.policy, limits, rebase=handle.rebase, number=handle.number, mode=handle.mode)
        return Join(
            offer.refit_id, offer.weight_version, handle.number, limits.get("receive", Join("-", 0, 0).receive_s)
        )

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Accept):
            self._accepted.append(message)
            return
        if isinstance(message, Refuse) and not message.refit_id:
            raise raised(message.error)
        if not isinstance(message, Settled | Refuse | Cancel | Drained):
            raise ProtocolViolation(f"{type(message).__name__} to a trainer", peer=self._line.peer)
        joined = message.joined if isinstance(message, Settled) else ""
        handle = self._handles.get(joined or message.refit_id)
        if handle is None:
            return
        if isinstance(message, Settled):
            with self._lock:
                self._handles.pop(handle.refit_id, None)
            handle.settled(message)
        elif isinstance(message, Refuse):
            self._over(handle, raised(message.error))
        elif isinstance(message, Drained):
            handle.drained = max(handle.drained, message.buckets)
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
            handle.released(None)
            return
        if isinstance(failed, PeerLost) and self._line.gone:
            raise failed
        self._line.send(Faulted(refit_id, fault(failed)))
        if handle is not None:
            handle.released(failed)

    def _packed(self, handle: PublishHandle, message: Accept) -> bytes:
        source = handle.source
        if source is None:
            raise PeerLost("the source is free already", peer="trainer")
        digests: list[int] = []
        slots = accepted(message)
        working = self._pouring if message.slots else self._filling
        for seconds in working(handle, source, slots, message, digests):
            self._serve(seconds)
            if handle.cancelled is not None:
                raise handle.cancelled
            if self._closing or handle.done():
                raise EngineClosed("the publisher gave this refit up")
        return words(digests)

    def _filling(
        self, handle: PublishHandle, source: Source, slots: list[Slot], message: Accept, digests: list[int]
    ) -> Iterator[float]:
        import numpy as np

        checked(handle.offer.tensors, slots, message.nbytes)
        mapping = self._kept.take(self._line.address, message.buffer, message.nbytes)
        found = np.zeros(len(slots), np.uint64)
        for _ in source.pack(slots, mapping, found):
            yield 0.0
        digests[:] = found.tolist()

    def _pouring(
        self, handle: PublishHandle, source: Source, slots: list[Slot], message: Accept, digests: list[int]
    ) -> Iterator[float]:
        geometry = Geometry(handle.offer.tensors, slots, message.slots, message.slot_nbytes)
        if geometry.slots * geometry.slot_nbytes > message.nbytes:
            raise ProtocolViolation(f"a ring of {geometry.slots} slots does not fit into {message.nbytes} bytes")

        def filled(buckets: int) -> None:
            self._line.send(Filled(message.refit_id, buckets))

        if message.device:
            lent = self._lent(message)
            self._line.send(Lend(message.refit_id, lent.handle, lent.nbytes))
            yield from pour_lent(source, geometry, lent, lambda: handle.drained, filled, digests)
        else:
            mapping = self._kept.take(self._line.address, message.buffer, message.nbytes)
            yield from pour(source, geometry, mapping, lambda: handle.drained, filled, digests)

    def _lent(self, message: Accept) -> LentRing:
        from pitstop.transports.cuda_memory import lend

        self._ring = lend(self._ring, message.device, message.nbytes)
        return self._ring

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

    def _over(self, handle: PublishHandle, error: PitstopError) -> None:
        with self._lock:
            self._handles.pop(handle.refit_id, None)
        handle.end(None, error)


def _readable(handle: PublishHandle) -> bool:
    return handle.kernels.done() or monotonic() - handle.since > _KERNELS_S
