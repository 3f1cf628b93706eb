"""What a transport keeps to: its engine side, and receivers in whatever processes they run in."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import unittest
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pitstop.engine.contract.checks import Contract, Ends, holds, soon
from pitstop.engine.errors import PeerLost, RemoteError
from pitstop.engine.ports import Sending, Transport
from pitstop.engine.refit import route
from pitstop.engine.worker_ports import Bucket, Inventory, Manifest, Receiver, Ticket, Trailer, WorkerLayout

if TYPE_CHECKING:
    from torch import Tensor

_OVER = 3.0
"""Seconds that a loss may be reported after its limit."""


class Rank(Protocol):
    """A worker rank with a receiver, for a check to handle."""

    layout: WorkerLayout

    async def receive(self, ticket: Ticket) -> None:
        """Start the ticket's receiver and return."""

    async def content(self) -> Mapping[str, str] | None:
        """Return what stands for each tensor that landed (as `TransportBench.content` has it); None if nothing did."""

    async def release(self) -> None:
        """Let go of what landed, as a backend does: the sink first, then `Receiver.close`. Idempotent."""


@dataclass(kw_only=True)
class TransportBench:
    """A transport, and what its checks need. `ranks`: two or more, on at least two replicas.

    Attributes:
        sending: makes the far end of an offer of a version; each call a new one, with a refit id of its own.
        content: what stands for each tensor of a version, by inventory name; the same as `Rank.content` returns.
        strike: kills or freezes a rank, so that it says no more.
        proves: whether receivers compare digests with the trailer.
        limits: `receive` and `silence`, in seconds.
    """

    transport: Transport
    inventory: Inventory
    ranks: Sequence[Rank]
    sending: Callable[[int], Sending]
    content: Callable[[int], Mapping[str, str]]
    strike: Callable[[Rank], Awaitable[None]] | None = None
    proves: bool = True
    limits: tuple[float, float] = (20.0, 1.5)


@dataclass
class _Refit:
    sending: Sending
    manifest: Manifest
    tickets: Sequence[Ticket]
    ends: Ends

    @property
    def refit_id(self) -> str:
        return self.sending.offer.refit_id


class TransportContract(Contract[TransportBench]):
    """See `pitstop.engine.contract`."""

    async def every_receiver_gets_a_ticket_of_its_own(self) -> None:
        """`plan` returns one ticket a receiver, in order, all for this refit, none for another."""
        async with self.make() as bench:
            refit = await _planned(bench, bench.sending(1))
            named = [(t.refit_id, t.replica, t.incarnation, t.rank) for t in refit.tickets]
            asked = [
                (refit.refit_id, r.layout.replica, r.layout.incarnation, r.layout.rank) for r in bench.ranks
            ]  # fmt: skip
            holds(named == asked, f"tickets are for {named}, not for {asked}")
            tokens = [ticket.token for ticket in refit.tickets if ticket.token]
            holds(len(tokens) == len(set(tokens)), "two receivers have the same token")
            await _given_up(bench, refit)

    async def what_lands_is_what_was_sent_bit_by_bit(self) -> None:
        """Every receiver holds every tensor exactly."""
        async with self.make() as bench:
            refit = await _delivered(bench, bench.sending(1))
            for rank in bench.ranks:
                holds(await rank.content() == bench.content(1), f"{rank.layout} does not hold what was sent")
            await _released(bench, refit)

    async def every_receiver_s_end_is_reported_exactly_once(self) -> None:
        """One `landed` each, never two, nothing after it; the watch ends with the release."""
        async with self.make() as bench:
            refit = await _delivered(bench, bench.sending(1))
            await _released(bench, refit)
            await refit.ends.ended()
            ends = [(p.replica, p.incarnation, p.rank, p.kind) for p in refit.ends.over]
            wanted = [(r.layout.replica, r.layout.incarnation, r.layout.rank, "landed") for r in bench.ranks]
            holds(sorted(ends) == sorted(wanted), f"reported as ended: {ends}")
            holds({p.refit_id for p in refit.ends.said} == {refit.refit_id}, "progress of another refit")

    async def one_version_after_another_lands(self) -> None:
        """Room that was released is used again, and nobody reads what was there before."""
        async with self.make() as bench:
            for version in range(1, 6):
                refit = await _delivered(bench, bench.sending(version))
                for rank in bench.ranks:
                    holds(await rank.content() == bench.content(version), f"not version {version} on {rank.layout}")
                await _released(bench, refit)

    async def what_landed_stays_until_it_is_let_go_of(self) -> None:
        """A receiver that has not let go keeps its version whole, though the refit is over and others go on."""
        async with self.make() as bench:
            first = await _delivered(bench, bench.sending(1))
            holder, others = bench.ranks[0], bench.ranks[1:]
            for rank in others:
                await rank.release()
            await bench.transport.release(first.refit_id)
            second = await _delivered(bench, bench.sending(2), others)
            holds(await holder.content() == bench.content(1), "what one held was overwritten by the next version")
            for rank in others:
                holds(await rank.content() == bench.content(2), f"not version 2 on {rank.layout}")
            await _released(bench, second)
            await holder.release()

    async def abort_ends_every_receiver_once_and_may_come_twice(self) -> None:
        """Those that have begun, and those that begin after it; none lands; the next refit works."""
        async with self.make() as bench:
            refit = await _planned(bench, bench.sending(1))
            early, late = bench.ranks[0], bench.ranks[-1]
            await early.receive(refit.tickets[0])
            for _ in range(2):
                await bench.transport.abort(refit.refit_id, PeerLost("the trainer is gone", peer="trainer"))
            await late.receive(refit.tickets[-1])
            over = await refit.ends.reached(2)
            holds({p.kind for p in over} == {"failed"}, f"after an abort: {[p.kind for p in over]}")
            holds(all(p.error is not None for p in over), "a failure without an error")
            await _released(bench, refit)
            holds(len(refit.ends.over) == 2, "an end was reported twice")
            await _released(bench, await _delivered(bench, bench.sending(2)))

    async def abort_and_release_of_what_is_not_there_do_nothing(self) -> None:
        """Unknown refits and second calls; a live refit is not touched by them."""
        async with self.make() as bench:
            refit = await _delivered(bench, bench.sending(1))
            for _ in range(2):
                await soon(bench.transport.abort("never-was", RemoteError("no")), "an abort did not return")
                await soon(bench.transport.release("never-was"), "a release did not return")
            for rank in bench.ranks:
                holds(await rank.content() == bench.content(1), "another refit's end was this one's")
            await _released(bench, refit)
            await bench.transport.release(refit.refit_id)

    async def a_receiver_that_never_comes_is_reported(self) -> None:
        """Within the silence limit after the seal; the others land."""
        async with self.make() as bench:
            refit = await _planned(bench, bench.sending(1))
            for rank, ticket in list(zip(bench.ranks, refit.tickets, strict=True))[1:]:
                await rank.receive(ticket)
            await _sealed(bench, refit, len(bench.ranks) - 1)
            await self._one_lost(bench, refit)

    async def a_receiver_that_is_struck_is_reported(self) -> None:
        """Killed or frozen after it has come: within the silence limit; the others land."""
        async with self.make() as bench:
            if bench.strike is None:
                raise unittest.SkipTest("this bench cannot strike a receiver")
            refit = await _planned(bench, bench.sending(1))
            for rank, ticket in zip(bench.ranks, refit.tickets, strict=True):
                await rank.receive(ticket)
            trailer = await _sent(bench, refit, len(bench.ranks))
            await refit.ends.attached(len(bench.ranks))
            await bench.strike(bench.ranks[0])
            began = time.monotonic()
            await refit.ends.reached(1, bench.limits[1] + _OVER)
            holds(time.monotonic() - began < bench.limits[1] + _OVER, "a silent receiver was reported late")
            await bench.transport.seal(trailer)
            await self._one_lost(bench, refit)

    async def bytes_that_are_not_what_was_sent_never_land(self) -> None:
        """A digest that does not fit ends every receiver with an error that names the tensor."""
        async with self.make() as bench:
            if not bench.proves:
                raise unittest.SkipTest("this transport carries nothing that could be proven")
            refit = await _planned(bench, bench.sending(1))
            for rank, ticket in zip(bench.ranks, refit.tickets, strict=True):
                await rank.receive(ticket)
            trailer = await _sent(bench, refit, len(bench.ranks))
            wrong = (trailer.digests[0] ^ 1, *trailer.digests[1:])
            await bench.transport.seal(replace(trailer, digests=wrong))
            over = await refit.ends.reached(len(bench.ranks))
            named = [progress.error.fields.get("tensor") for progress in over if progress.error is not None]
            first = refit.manifest.rows[0].spec.name
            holds(named == [first] * len(over), f"a wrong digest of {first} was reported as {named}")
            await _released(bench, refit)
            await _released(bench, await _delivered(bench, bench.sending(2)))

    async def a_version_is_delivered_again_or_said_to_be_gone(self) -> None:
        """`replay`: None for what was never sealed; the same content under another refit id for what was."""
        async with self.make() as bench:
            holds(bench.transport.replay(99) is None, "a version that never came can be replayed")
            await _released(bench, await _delivered(bench, bench.sending(1)))
            again = bench.transport.replay(1)
            if again is None:
                return
            holds(again.offer.weight_version == 1, f"a replay of version {again.offer.weight_version}, not 1")
            refit = await _delivered(bench, again)
            for rank in bench.ranks:
                holds(await rank.content() == bench.content(1), "a replay is not what was sent")
            await _released(bench, refit)

    async def the_loop_is_not_held_up(self) -> None:
        """No call blocks the event loop for a quarter of a second."""
        async with self.make() as bench:
            worst = 0.0

            async def tick() -> None:
                nonlocal worst
                while True:
                    due = time.monotonic() + 0.005
                    await asyncio.sleep(0.005)
                    worst = max(worst, time.monotonic() - due)

            task = asyncio.create_task(tick())
            await _released(bench, await _delivered(bench, bench.sending(1)))
            task.cancel()
            holds(worst < 0.25, f"the loop was held up for {worst:.3f} s")

    async def _one_lost(self, bench: TransportBench, refit: _Refit) -> None:
        over = await refit.ends.reached(len(bench.ranks), bench.limits[0] + _OVER)
        lost, *landed = sorted(over, key=lambda progress: progress.kind == "landed")
        who = bench.ranks[0].layout
        holds(
            (lost.replica, lost.rank) == (who.replica, who.rank), f"{lost.replica} rank {lost.rank} was lost, not {who}"
        )
        holds(lost.error is not None and lost.error.slug == "peer_lost", f"a loss was reported as {lost.error}")
        holds({p.kind for p in landed} <= {"landed"}, f"others of it: {[p.error for p in landed]}")
        for rank in bench.ranks[1:]:
            await rank.release()
        await bench.transport.release(refit.refit_id)
        await refit.ends.ended()
        holds(len(refit.ends.over) == len(bench.ranks), "an end was reported twice")
        await _released(bench, await _delivered(bench, bench.sending(2), bench.ranks[1:]), bench.ranks[1:])


class ThreadRank:
    """A rank of this process: its receiver, which `receiver` makes of a ticket, runs in a thread as in a worker."""

    def __init__(self, layout: WorkerLayout, receiver: Callable[[Ticket], Receiver]) -> None:
        self.layout = layout
        self._receiver = receiver
        self._now: tuple[Receiver, _Keeping, threading.Thread] | None = None

    async def receive(self, ticket: Ticket) -> None:
        """See `Rank.receive`."""
        receiver, sink = self._receiver(ticket), _Keeping()
        thread = threading.Thread(target=receiver.run, args=(sink,), daemon=True)
        self._now = receiver, sink, thread
        thread.start()

    async def content(self) -> Mapping[str, str] | None:
        """See `Rank.content`: a hash of dtype, shape and bytes of each tensor (`digest_of`)."""
        if self._now is None:
            return None
        _, sink, thread = self._now
        await asyncio.to_thread(thread.join, 30)
        return await asyncio.to_thread(sink.content)

    async def release(self) -> None:
        """See `Rank.release`."""
        if self._now is not None:
            receiver, sink, thread = self._now
            self._now = None
            receiver.abort()
            sink.release()
            await asyncio.to_thread(thread.join, 30)
            await asyncio.to_thread(receiver.close)


class _Keeping:
    """A sink that keeps what landed, where it landed."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []

    def landed(self, bucket: Bucket) -> None:
        self._buckets.append(bucket)

    def places(self) -> Mapping[str, Tensor]:
        """Return none."""
        return {}

    def hold(self) -> bool:
        """Do nothing."""
        return True

    def let_go(self) -> None:
        """Do nothing."""

    def apply(self) -> None:
        """Do nothing."""

    def finalize(self) -> None:
        """Do nothing."""

    def undo(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        self._buckets.clear()

    def content(self) -> dict[str, str] | None:
        named = {spec.name: digest_of(tensor) for bucket in self._buckets for spec, tensor in bucket.tensors}
        return named or None


def digest_of(tensor: object) -> str:
    """Return a hash of a tensor's dtype, shape and bytes: what `ThreadRank.content` has of each."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{type(tensor).__name__} is not a tensor")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + raw).hexdigest()


async def _planned(bench: TransportBench, sending: Sending, ranks: Sequence[Rank] | None = None) -> _Refit:
    ranks = bench.ranks if ranks is None else ranks
    manifest = route(sending.offer, bench.inventory)
    layouts = [rank.layout for rank in ranks]
    tickets = await soon(bench.transport.plan(sending.offer, manifest, layouts, bench.limits), "no plan came")
    return _Refit(sending, manifest, tickets, Ends(bench.transport, sending.offer.refit_id))


async def _sent(bench: TransportBench, refit: _Refit, here: int) -> Trailer:
    """Send, through a ring when the receivers that have begun have come: who comes later has missed something."""
    ring = bench.transport.ring(refit.refit_id)
    if ring is not None:
        await refit.ends.attached(here)
    return await soon(refit.sending.send(refit.manifest, refit.tickets, ring), "nothing was sent", bench.limits[0])


async def _sealed(bench: TransportBench, refit: _Refit, here: int) -> Trailer:
    trailer = await _sent(bench, refit, here)
    await soon(bench.transport.seal(trailer), "a seal did not return")
    return trailer


async def _delivered(bench: TransportBench, sending: Sending, ranks: Sequence[Rank] | None = None) -> _Refit:
    ranks = bench.ranks if ranks is None else ranks
    refit = await _planned(bench, sending, ranks)
    for rank, ticket in zip(ranks, refit.tickets, strict=True):
        await rank.receive(ticket)
    await _sealed(bench, refit, len(ranks))
    for progress in await refit.ends.reached(len(ranks), bench.limits[0] + _OVER):
        holds(progress.kind == "landed", f"{progress.replica} rank {progress.rank} did not land: {progress.error}")
    return refit


async def _released(bench: TransportBench, refit: _Refit, ranks: Sequence[Rank] | None = None) -> None:
    for rank in bench.ranks if ranks is None else ranks:
        await rank.release()
    await soon(bench.transport.release(refit.refit_id), "a release did not return")
    await refit.ends.ended()


async def _given_up(bench: TransportBench, refit: _Refit) -> None:
    await bench.transport.abort(refit.refit_id, RemoteError("the check is over"))
    await _released(bench, refit)
