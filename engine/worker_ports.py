"""Records and ports between a replica, its worker processes and the transports.

Torch appears only in annotations: importing this module loads nothing heavy. All records are frozen dataclasses
of plain values, so that msgspec can carry them between processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final, Literal, Protocol

from pitstop.engine.errors import ErrorRecord

if TYPE_CHECKING:
    from torch import Tensor

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element by torch's dtype name (without the `torch.` prefix)."""

Mode = Literal["auto", "staged", "in_place"]
MODES: Final[tuple[Mode, ...]] = ("auto", "staged", "in_place")
"""Where a version is received: in spare memory, while the replica serves, and proven there before it is suspended;
or straight into the live parameters of a suspended replica. `auto`: staged if there is memory for it."""


Staging = Literal["", "none", "device", "host", "shared_memory"]
"""In which memory a version waits for its swap: of the engine's GPU, of the engine's processes (page-locked where a GPU
is to read it), or the segment that it came in. `none` in place; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's name without the prefix) and shape of one tensor in checkpoint form."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's content in bytes."""
        return ITEMSIZE[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The checkpoint tensors that a replica's model is made of, recorded at launch.

    `tied` maps the name of a tensor that shares another's storage to that other's name. Either of the two
    may be left out of an offer, or both may come with equal content. `vocabulary` names the tensors that have a row
    for each token. `drafter` names those among `tensors` that are a trained drafter's. `unused` names what a
    checkpoint stores that refits do not bring, of a drafter that is not trained, or that no engine loads: it may be
    offered, and stays behind. Each group of
    `optional` tensors may come too, whole or not at all; what a version does not bring is then as if no version had
    ever brought it.
    """

    tensors: tuple[TensorSpec, ...]
    tied: dict[str, str] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    drafter: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    optional: tuple[tuple[TensorSpec, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """What a refit will deliver. Content-free: digests follow in the trailer.

    `cast` is None (dtypes must equal the inventory's) or "inventory" (floating-point tensors are cast to the
    inventory's dtypes on the trainer's side, before they travel). `headers` carry the W3C trace context.
    `device` is the one GPU on which all tensors lie, as `cuda:<uuid>`; empty for host memory, or several.
    `vocabulary` is None (embeddings and heads have as many rows as the inventory's) or "trim" (rows beyond them are
    padding, and stay where they are).
    """

    refit_id: str
    weight_version: int
    tensors: tuple[TensorSpec, ...]
    cast: Literal["inventory"] | None = None
    base_version: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    device: str = ""
    vocabulary: Literal["trim"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as offered, before any cast."""
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True, slots=True)
class Routed:
    """One offered tensor on its way: row `index` of the offer, delivered as `spec` (inventory name and dtype).

    Or a part of it: as many elements as `spec` has, from its flat element `start` on. None: all of it.
    """

    index: int
    spec: TensorSpec
    start: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What travels in a refit, in order, after names and dtypes were matched with the inventory.

    `equal` lists pairs of rows that the model ties: their digests must agree.
    """

    rows: tuple[Routed, ...]
    equal: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(row.spec.nbytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class Trailer:
    """Digests of a manifest's rows, in order, as unsigned 64-bit integers."""

    refit_id: str
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """Where one worker rank lives and what it can receive into.

    `device` is torch's name of it; `device_id` names a GPU to other processes, as `cuda:<uuid>`. `spare_nbytes` of
    its memory were free when the rank was asked. `numa_node` is the GPU's, where it is known; `host` is the machine.
    """

    replica: str
    incarnation: int
    rank: int
    world_size: int
    pid: int
    device: str
    device_id: str = ""
    spare_nbytes: int = 0
    numa_node: int | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and its byte offset in the buffer it travels in."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one worker rank needs to receive one refit.

    `receiver` names the class that receives, as `module:Class`; it is resolved only inside Pitstop's own
    packages or declared entry points. `buffer` is the path and `nbytes` the size of the shared segment,
    `address` is where progress is reported, `token` proves to that address that the reporter was asked to.
    Times are seconds.

    With `slots` the buffer is a ring of that many, of `slot_nbytes` each, and what travels is cut into buckets
    (`transports.buckets`); without, it holds the whole version, at the offsets of `tensors`. `device` names the GPU
    (`cuda:<uuid>`) on which the trainer lends the ring; then there is no path. `in_place`: the replica is suspended
    and each tensor goes to the sink as soon as it has come, unproven. `staging` says in which memory it waits if not,
    and `why`, for people, what led to that; `pace` is how many bytes a second may go there at most, 0 for no limit.
    """

    refit_id: str
    replica: str
    incarnation: int
    rank: int
    receiver: str
    buffer: str
    nbytes: int
    tensors: tuple[Placed, ...]
    address: str
    token: str
    receive_s: float
    silence_s: float
    slots: int = 0
    slot_nbytes: int = 0
    device: str = ""
    in_place: bool = False
    staging: Staging = ""
    why: str = ""
    pace: int = 0


ProgressKind = Literal["attached", "landed", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of one worker rank in one refit.

    `attached`: the rank is ready to receive. `landed`: every tensor is in its hands and proven against the
    trailer, and the sink holds it. `failed`: it gave up, for `error`; no live byte changed unless the ticket said
    `in_place`, and then the sink knows (`WorkerReply.touched`).
    """

    refit_id: str
    replica: str
    incarnation: int
    rank: int
    kind: ProgressKind
    nbytes: int = 0
    seconds: float = 0.0
    error: ErrorRecord | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """A group of tensors that landed together. The tensors may alias the transport's buffer."""

    refit_id: str
    tensors: Sequence[tuple[TensorSpec, Tensor]]


WorkerVerb = Literal[
    "describe", "learn", "receive", "apply", "finalize", "undo", "release", "fingerprint", "ways", "drafter",
    "interrupt", "start_profile", "stop_profile",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerOp:
    """An order to every worker rank of a replica.

    `learn` has it find out how `tensors`, the inventory, get into its live parameters; nothing runs the model then.
    `receive` starts a receiver thread for the rank's ticket and returns at once. `apply` puts what landed for
    `refit_id` into the live parameters, or checks that it is there whole if it was received in place; `finalize` does
    the post-load work; `undo` ends receiving and makes a model that was left half loaded runnable (never clean);
    `release` drops what landed. `ways` says how each tensor of the next version will be loaded. `drafter` loads a
    drafter that refits do not bring from its checkpoint.

    `fingerprint` returns a number for each tensor of the live model. Under a name (`refit_id`, any) it is taken beside
    the engine's steps: the first order of that name begins, and later ones have the answer once there is one, or
    `ReadingCutShort` if a refit or a sleep has come in between. `interrupt` ends it: nothing is read when it returns.
    `start_profile` and `stop_profile` are the engine's own profiler's.
    """

    verb: WorkerVerb
    refit_id: str = ""
    tickets: tuple[Ticket, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Ways:
    """How many of a rank's tensors were `copied` into its parameters by a load plan, or `reloaded` by the engine.

    `why` is the reason of the first that was reloaded. Of the copied, `straight` were received right at their places.
    """

    copied: int = 0
    reloaded: int = 0
    why: str = ""
    straight: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """How much of one rank's model a fingerprint is about.

    `nbytes` were read. `blind` names parameters that are not what the engine computes with: it has packed a copy away.
    `left_out` names tensors that change while the engine serves, with the reason.
    """

    nbytes: int = 0
    blind: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """One rank's answer to a `WorkerOp`. `touched`: live bytes may have changed.

    `ways` comes with `finalize`; `way_of` answers `ways`: "copied", or why not, by tensor.
    """

    rank: int
    touched: bool = False
    seconds: float = 0.0
    layout: WorkerLayout | None = None
    error: ErrorRecord | None = None
    fingerprint: dict[str, str] | None = None
    ways: Ways | None = None
    way_of: dict[str, str] | None = None
    seen: Seen | None = None


class WeightSink(Protocol):
    """The backend's side inside a worker: knows the model, knows no sockets."""

    def landed(self, bucket: Bucket) -> None:
        """Take over tensors, from a receiver's thread. They stay valid until `release`.

        With an `in_place` ticket it is called for one group of tensors after the other, in any order, each tensor
        once: they are not proven yet, lie in memory that nobody else writes to (or at their `places` already), and go
        into the live parameters at once. Otherwise it is called when all are proven. What it raises ends the receiver,
        which reports it.
        """

    def places(self) -> Mapping[str, Tensor]:
        """Return, with an `in_place` ticket, the live memory of tensors that can be written to it as they come.

        By the ticket's names; contiguous, of the tensor's own shape and dtype. Empty if there is none: all other
        tensors are to be received elsewhere. Changes nothing. A receiver writes to them only while it has `hold`.
        """

    def hold(self) -> bool:
        """Keep everybody else from the live parameters, which may change from now on; False if somebody has them.

        Raises:
            PitstopError: the refit was given up: nothing may be written any more.
        """

    def let_go(self) -> None:
        """End a `hold`. Whoever gave the refit up meanwhile has waited for this."""

    def apply(self) -> None:
        """Put what landed into the live parameters, or check that it is there whole if it was received in place.

        Called between engine steps, on the worker's main thread.
        """

    def finalize(self) -> None:
        """Do the post-load work. Called once, after `apply`."""

    def undo(self) -> None:
        """Make a half-loaded model runnable again, and take nothing more. It stays torn."""

    def release(self) -> None:
        """Drop every reference to what landed."""


class Receiver(Protocol):
    """The transport's side inside a worker, built from a ticket; runs in a thread of its own."""

    def run(self, sink: WeightSink) -> None:
        """Receive, prove, hand over to `sink.landed`, report on the back-channel. Bounded by the ticket's times."""

    def abort(self) -> None:
        """End `run` soon, from another thread. Idempotent."""

    def close(self) -> None:
        """Unmap what `run` mapped, after the sink has released it."""


class WeightSource(Protocol):
    """The trainer's side: what a sender reads from."""

    def specs(self) -> Sequence[TensorSpec]:
        """Return the declared tensors, in the order in which `tensors` yields them."""

    def tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yield the content. Order and specs equal `specs()` on every rank."""
