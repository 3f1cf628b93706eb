"""What goes over the control link: typed records, msgpack, one frame each.

A client (a trainer's publisher, or a receiver in a worker) opens with `Hello` and is answered by `Welcome` or
`Refuse`. Both sides send `Beat` every half second from the thread that does the work.

    trainer                                   engine                                  receiver (one a worker rank)
    Propose  -------------------------------> on_offer
             <------------------------------- Accept                                  Hello with the ticket's token
    (packs)                                                                           Report "attached"
    Lend     -------------------------------> Lend ---------------------------------> (maps a ring on a GPU)
    Filled   -------------------------------> Filled -------------------------------> (takes buckets out of a ring)
             <------------------------------- Drained <------------------------------ Drained
    Sent     -------------------------------> Seal ---------------------------------> (proves)
                                                    <-------------------------------- Report "landed", "failed"
                                              Noted --------------------------------> (keeps the link open)
                                                    <-------------------------------- LetGo, when the sink is done
             <------------------------------- Settled

`Cancel` goes to whoever has to give up; `Faulted` comes from a trainer that cannot go on, and answers a `Cancel`.
`Lend`, `Filled` and `Drained` exist only where the ticket has slots; the last two count buckets from the first on, so
that one may stand for several. Fields that end in `_s` are seconds. Digests, offsets and row numbers are packed
little-endian.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

PROTOCOL: Final = 4
"""Changes whenever two versions of this file could not talk to each other."""

MOST_TENSORS: Final = 1 << 20
MOST_BYTES: Final = 64 << 20
"""Most bytes of one message: a million tensors are offered in less."""

LONGEST_NAME: Final = 1024
LONGEST_TEXT: Final = 65536
MOST_DIMENSIONS: Final = 32
MOST_HEADERS: Final = 64
MOST_SLOTS: Final = 1024
MOST_SECONDS: Final = 1e9
WHOLE: Final = (1 << 64) - 1

Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
RefitId = Annotated[str, Meta(min_length=1, max_length=64)]
Path = Annotated[str, Meta(max_length=4096)]
Device = Annotated[str, Meta(max_length=64)]
Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
Pid = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
DTYPES: Final[tuple[Dtype, ...]] = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""In the order of their codes in `Accept`."""

Words = Annotated[bytes, Meta(max_length=8 * MOST_TENSORS)]
"""Packed unsigned 64-bit integers."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """An `ErrorRecord`."""

    slug: Name
    message: Text
    fields: Annotated[dict[Name, Text | int | float | None], Meta(max_length=64)] = {}
    traceback: Text = ""


class Hello(Struct, frozen=True, tag=True):
    """A client's first message. `pid_space` tells whether `pid` means the same process on both sides.

    Of a trainer's ranks, rank 0 sends. `group` keeps the ranks of several trainers apart.
    """

    protocol: int
    role: Literal["trainer", "receiver"]
    pid: Pid
    pid_space: Natural
    token: Annotated[str, Meta(max_length=128)] = ""
    rank: Natural = 0
    world_size: Annotated[int, Meta(ge=1, lt=1 << 31)] = 1
    group: Annotated[str, Meta(max_length=64)] = ""


class Welcome(Struct, frozen=True, tag=True):
    """The engine's answer. A client that reads `nonce` at `probe` shares memory with the engine."""

    protocol: int
    run_id: Name
    pid: Pid
    pid_space: Natural
    probe: Path
    nonce: Annotated[bytes, Meta(max_length=64)]
    transports: Annotated[tuple[Name, ...], Meta(max_length=16)]
    weight_version: Natural | None = None
    tensors: Natural = 0


class Refuse(Struct, frozen=True, tag=True):
    """What a client said was not allowed; about one refit, or about the link."""

    error: Fault
    refit_id: Annotated[str, Meta(max_length=64)] = ""


class Row(Struct, frozen=True, array_like=True):
    """One offered tensor."""

    name: Name
    dtype: Dtype
    shape: Annotated[tuple[Natural, ...], Meta(max_length=MOST_DIMENSIONS)]


class Propose(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A trainer's offer. `policy`, `mode` and `deadlines` are wishes for this refit; unset ones are the engine's.

    `rebase`: the trainer has begun its count of versions anew. `number`: its how-manieth publish this is, from 0.
    """

    refit_id: RefitId
    weight_version: Natural
    tensors: Annotated[tuple[Row, ...], Meta(max_length=MOST_TENSORS)]
    cast: Literal["inventory"] | None = None
    base_version: Natural | None = None
    headers: Annotated[dict[Name, Text], Meta(max_length=MOST_HEADERS)] = {}
    policy: Name | None = None
    deadlines: Annotated[dict[Name, Seconds], Meta(max_length=32)] = {}
    rebase: bool = False
    number: Natural = 0
    mode: Name | None = None
    device: Device = ""
    vocabulary: Literal["trim"] | None = None


class Join(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A rank that does not send takes part in publish `number` of its trainer; answered by `Settled` or `Refuse`.

    `refit_id` is its own name for it. It waits for rank 0's offer for `receive_s` at most.
    """

    refit_id: RefitId
    weight_version: Natural
    number: Natural
    receive_s: Seconds = 120.0


class Accept(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Write row n of the offer, `indices[n]`, as `dtypes[n]` at `offsets[n]` of the buffer.

    With `slots` the buffer is a ring of them, of `slot_nbytes` each, and both sides cut the rows into the same buckets
    (`transports.buckets`); `offsets` are empty then. With a `device` the trainer lends the ring there.
    Rows that are parts of tensors are `counts[n]` elements, from the flat element `starts[n]` on; both are empty where
    all rows are whole tensors, and a whole one's count is `WHOLE`.
    """

    refit_id: RefitId
    buffer: Path
    nbytes: Natural
    indices: Words
    dtypes: Annotated[bytes, Meta(max_length=MOST_TENSORS)]
    offsets: Words
    silence_s: Seconds
    slots: Annotated[int, Meta(ge=0, le=MOST_SLOTS)] = 0
    slot_nbytes: Natural = 0
    device: Device = ""
    starts: Words = b""
    counts: Words = b""


class Lend(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The trainer's ring: `nbytes` of a GPU's memory, as an IPC handle of the CUDA runtime."""

    refit_id: RefitId
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    nbytes: Natural


class Filled(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many buckets, from the first on, have been written."""

    refit_id: RefitId
    buckets: Natural


class Drained(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many buckets, from the first on, are no longer looked at: by this receiver; to a trainer, by all of them."""

    refit_id: RefitId
    buckets: Natural


class Sent(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Everything is in the buffer; the trainer will not touch it again."""

    refit_id: RefitId
    digests: Words


class Faulted(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The trainer gives this refit up and will not touch the buffer again."""

    refit_id: RefitId
    error: Fault


class Cancel(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The engine gives this refit up: stop, and say so."""

    refit_id: RefitId
    error: Fault


class Seal(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The buffer is whole; these are the digests."""

    refit_id: RefitId
    digests: Words


class Report(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A receiver's step. `nbytes` have landed, or are kept if it failed. `holds`: the sink may still look into them."""

    refit_id: RefitId
    kind: Literal["attached", "landed", "failed"]
    nbytes: Natural = 0
    seconds: Seconds = 0.0
    holds: bool = False
    error: Fault | None = None


class LetGo(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver and its sink will not look into the buffer again."""

    refit_id: RefitId


class Noted(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The engine has seen the receiver's last `Report` or `LetGo`."""

    refit_id: RefitId


class ReplicaPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A `ReplicaReport`."""

    committed: bool
    seconds: Annotated[dict[Name, float], Meta(max_length=64)]
    live: Natural = 0
    bubble: float | None = None
    error: Fault | None = None


class Settled(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A `RefitReport`: what became of the offer; `joined` is the name that a rank which does not send gave it."""

    refit_id: RefitId
    weight_version: Natural
    outcome: Name
    transport: Name
    nbytes: Natural
    tensors: Natural
    seconds: float
    sent_seconds: float
    replicas: Annotated[dict[Name, ReplicaPart], Meta(max_length=65536)] = {}
    error: Fault | None = None
    joined: Annotated[str, Meta(max_length=64)] = ""
    mode: Literal["staged", "in_place"] | None = None
    staging: Literal["", "none", "device", "host", "shared_memory"] = ""
    staging_reason: Text = ""


class Beat(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Nothing new, but alive."""


class Bye(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender closes the link."""


FromClient = Hello | Propose | Join | Lend | Filled | Drained | Sent | Faulted | Report | LetGo | Beat | Bye
FromEngine = Welcome | Refuse | Accept | Lend | Filled | Drained | Cancel | Seal | Noted | Settled | Beat | Bye
