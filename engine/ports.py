"""Ports of the engine: what the drivers need from a backend, a transport, an observer, a trainer's far end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pitstop.engine.counters import Counters
from pitstop.engine.errors import PitstopError
from pitstop.engine.lifecycle import Phase
from pitstop.engine.refit import Policy, RefitReport
from pitstop.engine.request import Adapter, Message, Piece, Request
from pitstop.engine.worker_ports import (
    Inventory,
    Manifest,
    Mode,
    Offer,
    Progress,
    Ticket,
    Trailer,
    WorkerLayout,
    WorkerOp,
    WorkerReply,
)

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Booted:
    """What a backend knows once its engine is up.

    `weight_version` is None when what was loaded proves nothing (a dummy load). `max_model_len` and
    `vocab_size` bound requests. `pid` is the engine process's, None if it has none of its own.
    """

    weight_version: int | None
    inventory: Inventory
    layout: tuple[WorkerLayout, ...]
    max_model_len: int
    vocab_size: int
    pid: int | None = None


class Leg(Protocol):
    """A request inside one engine. A stream is a sequence of legs."""

    async def next(self) -> Piece:
        """Wait for the next piece; the last one has a `finish_reason`.

        Raises:
            ReplicaDied: the engine died; `partial` still has what it had made.
        """

    def partial(self) -> Piece:
        """Return what was made and not yet yielded by `next`, without waiting. Called when the engine has died."""

    def abort(self) -> None:
        """Take the request out of the engine. Synchronous, idempotent; `next` then yields an "abort" piece."""


class Backend(Protocol):
    """One replica's engine. Called by `Replica` only, one lifecycle call at a time."""

    async def start(self, replica: str, incarnation: int) -> Booted:
        """Boot an engine. Called once an incarnation; `close` has ended the one before."""

    async def submit(self, request: Request) -> Leg:
        """Hand a request to the engine; return once the engine has accepted it.

        Cancelling the call leaves nothing in the engine.
        """

    async def suspend(self, policy: Policy) -> Mapping[str, int]:
        """Stop the engine between steps; return how many tokens each live leg has made, by request id.

        `recompute` also drops the KV cache of what is held; `wait` and `abort` are done by the caller
        beforehand. Returns only when no step runs and every output made has been counted.
        """

    async def resume(self) -> None:
        """Let the engine run. Called once a suspend."""

    async def drained(self) -> None:
        """Return when no leg is live in the engine."""

    async def reset_cache(self) -> bool:
        """Drop prefix caches. False: the engine refused, because requests hold blocks."""

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        """Run `op` in every worker rank; one reply a rank, errors inside it."""

    async def label(self, weight_version: int) -> None:
        """Have the engine's own outputs and spans say the version, where it can. Called at a commit, while paused."""

    async def sleep(self, level: int) -> None:
        """Give memory back: level 1 keeps weights in host memory, 2 discards them. The engine is suspended."""

    async def wake(self, *, kv_cache: bool) -> None:
        """Take memory again: weights first; the KV cache too, which also resumes the engine, if asked."""

    async def died(self) -> PitstopError:
        """Return when the engine of the present incarnation has died, with the reason. Never returns otherwise."""

    async def close(self) -> None:
        """End the engine and every process of it. Idempotent, bounded."""

    def output_at(self) -> float:
        """Return when (`time.monotonic`) the engine's last tokens were seen; 0.0 before the first."""

    async def output_after(self, moment: float) -> float:
        """Wait for the first tokens seen after `moment` (`time.monotonic`); return when that was."""

    async def counters(self) -> Counters:
        """Return what the engine has counted since it was started; empty where it does not count."""


@runtime_checkable
class AdapterHost(Protocol):
    """A backend whose engine can run adapters beside its weights, several at a time, each with a number of its own."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a version, beside every other one. What fails leaves nothing in the engine."""

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Forget a version that no request runs on. Idempotent."""


class Renderer(Protocol):
    """Turns prompts into ids and ids into text. One a fleet, from the model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokenize text, with exactly one BOS where the tokenizer has one."""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Render chat messages with the model's template, ready for the assistant's turn."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""


class ReplicaClient(Protocol):
    """What the fleet sees of a replica; local now, in another process or a Ray actor later."""

    name: str

    @property
    def phase(self) -> Phase:
        """Where the replica is."""

    @property
    def weight_version(self) -> int | None:
        """The version it has proven, if any."""

    @property
    def load(self) -> int:
        """Requests it holds."""


class Transport(Protocol):
    """Engine side of a way that weights travel; touches no tensor."""

    name: str

    async def plan(
        self,
        offer: Offer,
        manifest: Manifest,
        receivers: Sequence[WorkerLayout],
        limits: tuple[float, float],
        mode: Mode = "auto",
    ) -> Sequence[Ticket]:
        """Make room for what comes and return one ticket a receiver. `limits`: receive and silence, in seconds.

        All tickets are of one kind: the same buffer, all `in_place` or none.

        Raises:
            OfferRejected: there is no room; nothing was changed.
        """

    def ring(self, refit_id: str) -> Ring | None:
        """Return what a sender paces itself by, if the tickets of this refit have slots."""

    async def seal(self, trailer: Trailer) -> None:
        """Everything was sent: let the receivers prove what they have against the digests."""

    def watch(self, refit_id: str) -> AsyncIterator[Progress]:
        """Yield what each receiver reports, a silent one's loss included, until `release`."""

    async def abort(self, refit_id: str, why: PitstopError) -> None:
        """Tell every receiver to give up. Idempotent."""

    async def release(self, refit_id: str) -> None:
        """The refit is over for every receiver: the room may be used again. Idempotent."""

    def replay(self, weight_version: int) -> Sending | None:
        """Return a far end that delivers a sealed version again, from the room it still lies in; None if it is gone.

        Its offer names the version as the trainer sent it, under a refit id of its own.
        """


class Ring(Protocol):
    """The pace of one ring: how many buckets have been written, and how many every reader is done with.

    Called and calling on the event loop. Bucket n lies in slot n modulo `Ticket.slots`; it may be written once
    `drained` is above n - slots. Readers that fail, die or take too long no longer count.
    """

    @property
    def drained(self) -> int:
        """How many buckets every reader is done with."""

    def lent(self, handle: bytes, nbytes: int) -> None:
        """The trainer lends `nbytes` of its GPU's memory as the ring, under this handle."""

    def filled(self, buckets: int) -> None:
        """That many buckets have been written, from the first on."""

    def on_drained(self, call: Callable[[int], object]) -> None:
        """Have `call` told whenever `drained` grows."""


class Sending(Protocol):
    """The far end of one offer: a trainer, here or in another process."""

    offer: Offer

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        """Have the content written to where the tickets say; return its digests when the source is free again.

        With a `ring` it is called when every receiver that will ever take part has attached (or failed).

        Raises:
            PeerLost, WorkerFailed, CheckpointUnreadable: the trainer died, went silent or failed.
        """

    async def settled(self, report: RefitReport) -> None:
        """Tell the trainer what became of its offer. Must not raise."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A replica went from one phase to another. `at` is `time.time_ns()`.

    `detail` holds what is known at this moment: live, released, bytes, tensors, policy, mode, cache.
    """

    replica: str
    incarnation: int
    before: Phase
    event: str
    after: Phase
    at: int
    refit_id: str | None = None
    weight_version: int | None = None
    error: str | None = None
    detail: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """Something with a beginning and an end that is not a phase.

    `kind` is "refit", "stage", "send_weights" or "generate". `key` is unique among what is open; `parent` is the
    key of open work in this process, `headers` the W3C context of work in another one (or of the caller).
    `at` is `time.time_ns()`.
    """

    kind: str
    key: str
    at: int
    parent: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    detail: Mapping[str, Scalar] = field(default_factory=dict)


class Observer(Protocol):
    """Is told what happens. Synchronous, quick, must not raise; plain data only.

    A `Transition` with a `refit_id` belongs to the open work `refit:<refit_id>`.
    """

    def transition(self, change: Transition) -> None:
        """A replica changed phase."""

    def opened(self, work: Work) -> Mapping[str, str]:
        """Work began; return the W3C headers that make other processes' work its children (may be empty)."""

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """Work ended; `error` is the slug of what ended it."""

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        """A number was observed (names in `pitstop.telemetry.names`)."""


class NullObserver:
    """Sees nothing."""

    def transition(self, change: Transition) -> None:
        """Ignore it."""

    def opened(self, work: Work) -> Mapping[str, str]:
        """Ignore it; propagate what the caller brought."""
        return work.headers

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """Ignore it."""

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        """Ignore it."""


class Guarded:
    """Keeps an observer's faults from its subjects: what it raises is dropped and counted in `dropped`."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.dropped = 0

    def transition(self, change: Transition) -> None:
        """Pass on."""
        try:
            self._observer.transition(change)
        except Exception:  # noqa: BLE001
            self.dropped += 1

    def opened(self, work: Work) -> Mapping[str, str]:
        """Pass on; propagate the caller's headers if the observer fails."""
        try:
            return self._observer.opened(work)
        except Exception:  # noqa: BLE001
            self.dropped += 1
            return work.headers

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """Pass on."""
        try:
            self._observer.closed(key, at, error, detail)
        except Exception:  # noqa: BLE001
            self.dropped += 1

    def counted(self, name: str, value: float, detail: Mapping[str, Scalar] | None = None) -> None:
        """Pass on."""
        try:
            self._observer.counted(name, value, detail)
        except Exception:  # noqa: BLE001
            self.dropped += 1


_installed: list[Observer] = []


def install_observer(observer: Observer | None) -> None:
    """Make `observer` what engines and publishers of this process take by default; None takes it away."""
    _installed[:] = [] if observer is None else [observer]


def default_observer() -> Observer:
    """Return the process's observer, guarded; one that sees nothing if none was installed."""
    return Guarded(_installed[0]) if _installed else NullObserver()
