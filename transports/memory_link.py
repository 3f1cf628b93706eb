"""A trainer in the engine's own process: the same packing, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import repeat
from typing import TYPE_CHECKING, Final, Literal
from uuid import uuid4

from pitstop.engine.errors import CheckpointUnreadable, DeadlineExceeded, LocalError, PitstopError, WorkerFailed
from pitstop.engine.ports import NullObserver, Observer, Ring, Work
from pitstop.engine.refit import RefitReport
from pitstop.engine.worker_ports import Manifest, Offer, Ticket, Trailer
from pitstop.transports.address import parsed
from pitstop.transports.aside import aside
from pitstop.transports.checkpoint_source import CheckpointSource
from pitstop.transports.packing import Source, slots_of
from pitstop.transports.pool import WRITING
from pitstop.transports.pouring import Geometry, pour, pour_lent, prepare_lent
from pitstop.transports.segment import Kept
from pitstop.transports.sources import Publishable, device_of, source_of

if TYPE_CHECKING:
    from pitstop.transports.cuda_memory import LentRing

_STOP_S: Final = 2.0
_kept: Final = Kept("write")
_rings: Final[dict[str, LentRing]] = {}  # one an engine: another one's receivers may still be reading theirs
_lending: Final = threading.Lock()


def memory_sending(
    what: Publishable,
    *,
    weight_version: int,
    cast: Literal["inventory"] | None = None,
    vocabulary: Literal["trim"] | None = None,
    headers: Mapping[str, str] | None = None,
    refit_id: str | None = None,
    observer: Observer | None = None,
) -> MemorySending:
    """Return the far end of an offer of this process. Needs no event loop; a path's headers are read here.

    Raises:
        OfferRejected, CheckpointUnreadable, InvalidRequest: see `sources.source_of`.
    """
    source = source_of(what)
    offer = Offer(
        refit_id or uuid4().hex, weight_version, source.specs(), cast, None, dict(headers or {}), device_of(source),
        vocabulary,
    )  # fmt: skip
    return MemorySending(offer, source, observer)


async def checkpoint_sending(
    path: str | os.PathLike[str],
    *,
    seconds: float,
    weight_version: int,
    cast: Literal["inventory"] | None = None,
    vocabulary: Literal["trim"] | None = None,
    headers: Mapping[str, str] | None = None,
    refit_id: str | None = None,
    observer: Observer | None = None,
    files: tuple[object, ...] | None = None,
) -> MemorySending:
    """`memory_sending` of a checkpoint, opened in a thread of its own that is left behind if a file system hangs.

    `files` is `MemorySending.files` of an earlier time: the checkpoint must still be the same files, unchanged.

    Raises:
        DeadlineExceeded: it was not open within `seconds`. Should it ever be, it is closed.
        CheckpointUnreadable: see `sources.source_of`.
    """

    def opening() -> MemorySending:
        sending = memory_sending(
            path, weight_version=weight_version, cast=cast, vocabulary=vocabulary, headers=headers, refit_id=refit_id,
            observer=observer,
        )  # fmt: skip
        if files not in (None, sending.files):
            sending.dropped()
            raise CheckpointUnreadable(f"{os.fspath(path)} has changed since the engine booted from it")
        return sending

    # Not the loop's executor: see `send`.
    opened = aside(opening)
    waiting = asyncio.wrap_future(opened)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(waiting)
    except TimeoutError:
        opened.add_done_callback(_unwanted)
        raise DeadlineExceeded(
            f"{os.fspath(path)} could not be opened within {seconds:g} s", phase="open", peer="disk", seconds=seconds
        ) from None
    except asyncio.CancelledError:
        opened.add_done_callback(_unwanted)
        raise


def _unwanted(opened: Future[MemorySending]) -> None:
    if opened.exception() is None:
        opened.result().dropped()


class MemorySending:
    """Implements `ports.Sending`. `observer` is told about the send, as a part of the refit."""

    def __init__(self, offer: Offer, source: Source, observer: Observer | None = None) -> None:
        self.offer = offer
        self.transport = "memory"
        self._source: Source | None = source
        self.files: tuple[object, ...] = source.files if isinstance(source, CheckpointSource) else ()
        self._observer = observer or NullObserver()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    async def readable(self, seconds: float = 60.0) -> None:
        """Return when what it takes to read the source is there, or after so long."""
        if self.offer.device:
            # An engine that receives in place would wait for the kernels, suspended.
            kernels = asyncio.wrap_future(aside(lambda: prepare_lent(self.offer.device)))
            # What is wrong with the GPU is found again, and told, when the source is read.
            kernels.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({kernels}, timeout=seconds)

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        """See `Sending.send`. Ends soon when cancelled; the source is not read any more then.

        Raises:
            CheckpointUnreadable: the files have changed or cannot be read.
            WorkerFailed: reading the source failed in another way.
            DeadlineExceeded: it was not done within the tickets' `receive_s`.
        """
        source, self._source = self._source, None
        if source is None or len({ticket.buffer for ticket in tickets}) != 1:
            raise LocalError(f"{self.offer.refit_id} was sent before, or its tickets name no buffer, or several")
        refit_id, first = self.offer.refit_id, tickets[0]
        loop = asyncio.get_running_loop()
        pace = None if ring is None else _Pace(ring, loop)
        if ring is not None:
            self.transport = "cuda_ipc" if first.device else "memory_ring"
        digests: asyncio.Future[tuple[int, ...]] = loop.create_future()

        def pack() -> None:
            try:
                result: tuple[int, ...] | PitstopError = self._pack(source, manifest, first, pace)
            except PitstopError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - a source may fail in any way
                kind = type(error).__name__
                result = WorkerFailed(f"reading the source failed: {error!r}", operation="send", kind=kind)
            finally:
                source.close()
                WRITING.discard(refit_id)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_resolve, digests, result)

        WRITING.add(refit_id)
        key = f"send_weights:{refit_id}"
        self._observer.opened(Work("send_weights", key, time.time_ns(), f"refit:{refit_id}"))
        # Not the loop's executor: a file system that hangs would take its threads away from everybody.
        self._thread = threading.Thread(target=pack, name=f"pitstop-send-{refit_id[:8]}", daemon=True)
        self._thread.start()
        slug: str | None = None
        try:
            async with asyncio.timeout(first.receive_s):
                await asyncio.wait({digests})
            return Trailer(refit_id, digests.result())
        except TimeoutError:
            slug = DeadlineExceeded.slug
            await self._stopped(digests)
            raise DeadlineExceeded(
                f"the source could not be read within {first.receive_s:g} s",
                phase="send", peer="trainer", seconds=first.receive_s,
            ) from None  # fmt: skip
        except asyncio.CancelledError:
            slug = "cancelled"
            await self._stopped(digests)
            raise
        except PitstopError as error:
            slug = error.slug
            raise
        finally:
            self._observer.closed(key, time.time_ns(), slug)

    async def settled(self, report: RefitReport) -> None:
        """See `Sending.settled`."""
        self.dropped()

    def dropped(self) -> None:
        """Stop reading, and close what nobody has begun to read. Idempotent."""
        self._stop.set()
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _pack(self, source: Source, manifest: Manifest, ticket: Ticket, pace: _Pace | None) -> tuple[int, ...]:
        import numpy as np

        if pace is not None:
            return self._pour(source, manifest, ticket, pace)
        slots = slots_of(manifest, (placed.offset for placed in ticket.tensors))
        mapping = _kept.take(ticket.address, ticket.buffer, ticket.nbytes)
        digests = np.zeros(len(slots), np.uint64)
        for _ in source.pack(slots, mapping, digests):
            if self._stop.is_set():
                raise LocalError("the refit was given up")
        return tuple(digests.tolist())

    def _pour(self, source: Source, manifest: Manifest, ticket: Ticket, pace: _Pace) -> tuple[int, ...]:
        rows = slots_of(manifest, repeat(0))
        geometry = Geometry(self.offer.tensors, rows, ticket.slots, ticket.slot_nbytes)
        digests: list[int] = []
        if ticket.device:
            lent = _lent(ticket)
            pace.lent(lent.handle, lent.nbytes)
            pouring = pour_lent(source, geometry, lent, pace.drained, pace.filled, digests)
        else:
            mapping = _kept.take(ticket.address, ticket.buffer, ticket.nbytes)
            pouring = pour(source, geometry, mapping, pace.drained, pace.filled, digests)
        for seconds in pouring:
            if seconds:
                pace.wait(seconds)
            if self._stop.is_set():
                raise LocalError("the refit was given up")
        return tuple(digests)

    async def _stopped(self, digests: asyncio.Future[tuple[int, ...]]) -> None:
        """Have the thread stop; it looks every few milliseconds, unless a read hangs."""
        self._stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({digests}, timeout=_STOP_S)


class _Pace:
    """A ring's pace, for a thread."""

    def __init__(self, ring: Ring, loop: asyncio.AbstractEventLoop) -> None:
        self._ring = ring
        self._loop = loop
        self._drained = self._seen = 0
        self._grown = threading.Condition()
        ring.on_drained(self._told)

    def drained(self) -> int:
        """Return how many buckets every receiver is done with."""
        return self._drained

    def lent(self, handle: bytes, nbytes: int) -> None:
        """See `Ring.lent`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ring.lent, handle, nbytes)

    def filled(self, buckets: int) -> None:
        """That many have been written."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._ring.filled, buckets)

    def wait(self, seconds: float) -> None:
        """Wait until `drained` has grown, or so long. It may have grown before."""
        with self._grown:
            before = self._seen
            self._grown.wait_for(lambda: self._drained > before, seconds)
            self._seen = self._drained

    def _told(self, buckets: int) -> None:
        with self._grown:
            self._drained = buckets
            self._grown.notify_all()


def _lent(ticket: Ticket) -> LentRing:
    from pitstop.transports.cuda_memory import lend

    with _lending:
        for address in [address for address in _rings if _ended(address)]:
            del _rings[address]
        _rings[ticket.address] = ring = lend(_rings.pop(ticket.address, None), ticket.device, ticket.nbytes)
        return ring


def _ended(engine: str) -> bool:
    """Whether an engine has closed: it takes its socket's file with it."""
    path = parsed(engine).path
    return path is not None and not path.exists()


def _resolve(digests: asyncio.Future[tuple[int, ...]], result: tuple[int, ...] | PitstopError) -> None:
    if digests.done():
        return
    if isinstance(result, PitstopError):
        digests.set_exception(result)
        digests.exception()  # nobody may ask for it any more
    else:
        digests.set_result(result)
