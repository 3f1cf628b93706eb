"""The trainer's side: publish weights to a running engine, from any process on its host.

    with Publisher.connect(address) as publisher:
        handle = publisher.publish(model.named_parameters(), weight_version=7)
        handle.sent.wait()                    # the optimizer may step again
        report = handle.result(timeout=60)

From asyncio, `async with await Publisher.connect_async(address) as publisher`, and `await handle`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self
from uuid import uuid4

from pitstop.engine.ports import Guarded, Observer, default_observer
from pitstop.engine.worker_ports import Mode, Offer
from pitstop.transports.publish_handle import PublishHandle
from pitstop.transports.reports import judge, judge_offer
from pitstop.transports.sources import Publishable, device_of, source_of
from pitstop.transports.trainer_link import TrainerLink
from pitstop.transports.zmq_link import Rank


class Publisher:
    """A connection to an engine. Thread-safe. Make one with `connect`.

    When the engine dies, closes, or says nothing for too long, open handles fail with `PeerLost` and this publisher is
    over: connect again. With `reconnect` it connects again by itself, as soon as an engine is at that address.
    One that nobody refers to any more closes itself when the last of its refits has ended.
    """

    def __init__(self, link: TrainerLink, observer: Observer | None) -> None:
        self._link = link
        self._observer = default_observer() if observer is None else Guarded(observer)
        weakref.finalize(self, _abandoned, weakref.ref(link)).atexit = False

    @property
    def transport(self) -> str:
        """How weights travel, as negotiated."""
        return self._link.transport

    @property
    def weight_version(self) -> int | None:
        """What the engine served when it was connected to; None if nothing yet."""
        return self._link.weight_version

    @classmethod
    def connect(
        cls, address: str, *, timeout: float = 10.0, observer: Observer | None = None, reconnect: bool = False,
        rank: int = 0, world_size: int = 1, group: str = "",
    ) -> Publisher:  # fmt: skip
        """Connect to the engine at `address`, as its `address` or `tcp_address` says, within `timeout` seconds.

        `observer` is told about every send; by default the one that telemetry's set-up installed. `reconnect`: when
        the engine is gone, what is open fails with `PeerLost`, and what is published after that is offered to the
        next engine at the same address, if one is there within `timeout` seconds.

        A trainer of `world_size` ranks connects with each `rank`. Rank 0 sends; on the others `publish` takes part
        without sending, and the handle ends with the same report or error. The contract: every rank calls `publish`
        for the same versions in the same order, and connects anew when rank 0 does. DTensors are gathered inside
        `publish`, in the calling thread, one at a time, in step on all ranks, and kept by rank 0. An iterable is read
        to its end there too, on every rank: one that gathers by itself has to gather in the same order everywhere and
        to give its tensors whole; what the others give is dropped. No training step runs meanwhile. Several such
        trainers at one engine keep apart by `group`.

        Raises:
            PeerLost: no engine answers there.
            InvalidRequest: there is no such rank.
            KeyUnreadable, AccessDenied: a TCP address whose key is absent, or not the engine's.
            LocalError: not an address, or the engine's memory cannot be shared from here; says why.
            ProtocolViolation: the engine speaks another version of the protocol.
        """
        return cls(TrainerLink(address, timeout, Rank(rank, world_size, group), reconnect=reconnect), observer)

    @classmethod
    async def connect_async(
        cls,
        address: str,
        *,
        timeout: float = 10.0,  # noqa: ASYNC109 - it is the thread's
        observer: Observer | None = None,
        reconnect: bool = False,
        rank: int = 0,
        world_size: int = 1,
        group: str = "",
    ) -> Publisher:
        """`connect`, in a thread of its own; if it is cancelled, the connection is closed as soon as it is made."""
        connect = functools.partial(
            cls.connect, address, timeout=timeout, observer=observer, reconnect=reconnect,
            rank=rank, world_size=world_size, group=group,
        )  # fmt: skip
        connecting = asyncio.ensure_future(asyncio.to_thread(connect))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_unwanted)
            raise

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
        mode: Mode | None = None,
        vocabulary: Literal["trim"] | None = None,
    ) -> PublishHandle:
        """Offer weights as `weight_version`; return at once.

        What is published (named tensors, a mapping, a module, or a checkpoint's path) must stay unchanged until
        `handle.sent` is set. A module that PEFT has wrapped is sent with its adapter merged in. Several may be under
        way: the engine takes the latest. `cast="inventory"` casts floating-point tensors to the dtypes of the engine's
        checkpoint; with `vocabulary="trim"` rows of embeddings and heads beyond the checkpoint's are padding, and not
        sent. `policy` is what becomes of requests in flight (keep, recompute, wait, abort), `deadlines` are limits of
        this refit in seconds (suspend, drain, receive, receive_per_gib, finalize, resume, control, silence); the
        engine's own count where unset. `mode` is where replicas receive (auto, staged, in_place:
        `pitstop.engine.refit.RefitOptions`). `headers` are the W3C context that the send belongs to. A trainer that
        has begun its count of versions anew says so with `rebase=True`, once: the version need not be above the
        committed one (else `StaleVersion` is what the handle raises), and later versions are counted from it.

        Raises:
            OfferRejected, CheckpointUnreadable: it cannot be read; names the tensor or the file.
            AdapterRejected: its adapter cannot be merged; names the layer.
            PublishOrder: the ranks' DTensors differ in names, dtypes, shapes or order.
            InvalidRequest, UnsupportedPolicy: an argument that cannot be.
            EngineClosed: the publisher is closed.
            PeerLost: the engine is gone.
        """
        wishes = dict(deadlines or {})
        judge(weight_version, cast, policy, wishes, mode, vocabulary)
        wishes = {name: float(seconds) for name, seconds in wishes.items()}
        source = source_of(what, keep=self._link.sends)
        try:
            offer = Offer(
                uuid4().hex[:16], weight_version, source.specs(), cast, None, dict(headers or {}), device_of(source),
                vocabulary,
            )  # fmt: skip
            judge_offer(offer.tensors, offer.headers)
            handle = PublishHandle(offer, source, policy, wishes, rebase=rebase, mode=mode)
            handle.publisher = self
            self._link.offer(handle, self._observer)
        except BaseException:
            source.close()
            raise
        return handle

    def close(self) -> None:
        """Close the link. Handles that have not ended fail with `EngineClosed`. Takes a few seconds at most."""
        self._link.close()

    async def aclose(self) -> None:
        """`close`, without keeping an event loop waiting."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _abandoned(link: weakref.ref[TrainerLink]) -> None:
    """End the link of a publisher that was collected. Its thread keeps it until then."""
    if (alive := link()) is not None:
        alive.abandon()


def _unwanted(connecting: asyncio.Future[Publisher]) -> None:
    """Close what nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        threading.Thread(target=connecting.result().close, name="pitstop-unwanted", daemon=True).start()
