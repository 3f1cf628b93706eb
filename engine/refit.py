"""What a refit is, decided without doing it: options, the match of an offer with an inventory, the report. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final, Literal

from pitstop.engine.counters import Acceptance
from pitstop.engine.errors import (
    DtypeMismatch,
    MissingTensors,
    OfferRejected,
    PitstopError,
    RefitFailed,
    RepeatedTensors,
    ShapeMismatch,
    TiedTensorsDiffer,
    UnexpectedTensors,
    UnsupportedPolicy,
    hint,
    names,
    near,
)
from pitstop.engine.naming import Names, Part, home, plain
from pitstop.engine.worker_ports import (
    MODES,
    Inventory,
    Manifest,
    Mode,
    Offer,
    Routed,
    Staging,
    TensorSpec,
    Trailer,
    Ways,
)

Policy = Literal["keep", "recompute", "wait", "abort"]
POLICIES: Final[tuple[Policy, ...]] = ("keep", "recompute", "wait", "abort")

Content = Mapping[str, int]
"""The digest of each tensor of a model, tied ones under the name of the one that they are tied to."""

_GIB: Final = 1 << 30
_FOREVER: Final = 1e7  # seconds: nothing waits for ever, and what is longer than this is meant as for ever
_FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds. Every wait has one; all but `boot`, the engine's own (`launch(boot_seconds=)`), are
    settable per refit.

    `receive` grows by `receive_per_gib` for each GiB on the wire; `drain` is the policy `wait`'s own limit, in
    which requests in flight must end; `silence` is how long a peer may say nothing at all.
    """

    suspend: float = 30.0
    drain: float = 600.0
    receive: float = 120.0
    receive_per_gib: float = 1.0
    finalize: float = 60.0
    resume: float = 10.0
    control: float = 10.0
    silence: float = 5.0
    boot: float = 600.0

    def __post_init__(self) -> None:
        for item in fields(self):
            seconds = getattr(self, item.name)
            least = 0 if item.name == "receive_per_gib" else 1e-9
            if not least <= seconds < _FOREVER:
                raise UnsupportedPolicy(f"deadline {item.name} is {seconds} s, not above 0 and below {_FOREVER:g}")

    def receiving(self, nbytes: int) -> float:
        """Limit for receiving `nbytes`."""
        return self.receive + self.receive_per_gib * nbytes / _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitOptions:
    """How one refit treats requests in flight, and how long its phases may take.

    `keep`: they continue on their old KV cache. `recompute`: they continue, their KV cache is rebuilt under the
    new weights. `wait`: they finish first. `abort`: they end with what they have.
    `rebase`: the version need not be above the committed one, and later versions are counted from it.
    `mode`: where the version is received (`worker_ports.MODES`). What fails in place leaves a replica QUARANTINED.
    """

    policy: Policy = "recompute"
    deadlines: Deadlines = field(default_factory=Deadlines)
    rebase: bool = False
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UnsupportedPolicy(f"policy {self.policy!r} is not one of {', '.join(POLICIES)}")
        if self.mode not in MODES:
            raise UnsupportedPolicy(f"mode {self.mode!r} is not one of {', '.join(MODES)}")

    def with_deadlines(self, **seconds: float) -> RefitOptions:
        """Return a copy with some deadlines changed."""
        return replace(self, deadlines=replace(self.deadlines, **seconds))


def route(offer: Offer, inventory: Inventory) -> Manifest:
    """Match every offered tensor with the inventory.

    Rules: names are matched as `naming` does; one tensor of fused experts stands for many; of two tied tensors either
    may be left out; what the checkpoint stores for a drafter that refits do not bring stays behind; shapes must agree,
    but for padding of a vocabulary if `offer.vocabulary == "trim"`; dtypes must agree unless
    `offer.cast == "inventory"` and both are floating-point.

    Raises:
        UnexpectedTensors, RepeatedTensors, MissingTensors, ShapeMismatch, DtypeMismatch: named, with near matches.
    """
    if not offer.tensors:
        raise OfferRejected("the offer has no tensors")
    wanted = {spec.name: spec for spec in inventory.tensors}
    known = wanted | {twin: replace(wanted[base], name=twin) for twin, base in inventory.tied.items() if base in wanted}
    known |= {spec.name: spec for group in inventory.optional for spec in group}
    model = Names(known)
    found = model.resolve(offer.tensors)
    rows = [row for i, match in enumerate(found) for row in _rows(i, match)]
    _all_expected(offer, model, found, rows, known, wanted, inventory)
    _each_once(offer, rows)
    at = {row.spec.name: n for n, row in enumerate(rows)}
    absent = [n for n in wanted if n not in at and not _twin_sent(n, inventory, at)] + _cut_short(inventory, at)
    if absent:
        ours = not set(absent) <= set(inventory.drafter)
        remedy = "" if ours else "; they are its drafter's: if it is not trained, launch with drafter='frozen'"
        raise MissingTensors(
            f"{len(absent)} tensors of the model are missing from the offer: {names(absent)}{remedy}",
            tensor=min(absent),
        )
    rows = [_trimmed(row, offer, inventory) for row in rows]
    _same_shape(offer, rows, inventory)
    _same_dtype(offer, rows)
    equal = tuple((at[twin], at[base]) for twin, base in inventory.tied.items() if twin in at and base in at)
    return Manifest(tuple(rows), equal)


def _rows(index: int, match: tuple[Part, ...] | TensorSpec | None) -> list[Routed]:
    if match is None:
        return []
    if isinstance(match, TensorSpec):
        return [Routed(index, match)]
    return [Routed(index, part.spec, part.start) for part in match]


def _all_expected(
    offer: Offer,
    model: Names,
    found: list[tuple[Part, ...] | TensorSpec | None],
    rows: list[Routed],
    known: Mapping[str, TensorSpec],
    wanted: Mapping[str, TensorSpec],
    inventory: Inventory,
) -> None:
    unused = {home(name) for name in inventory.unused}
    strange = [
        spec.name
        for spec, match in zip(offer.tensors, found, strict=True)
        if match is None and home(spec.name) not in unused
    ]
    if not strange:
        return
    taken = {row.spec.name for row in rows}
    free = [name for name in known if name not in taken]
    missing = [name for name in wanted if name not in taken]
    also = f" Not offered: {names(missing)}." if missing else ""
    remedy = model.fused(strange) or hint({n: near(plain(n), free) for n in strange[:64]})
    raise UnexpectedTensors(
        f"{len(strange)} offered tensors are not of this model: {names(strange)}.{also}{remedy}"
        f"{_frozen(strange, inventory)}",
        tensor=min(strange),
    )


def _frozen(strange: Sequence[str], inventory: Inventory) -> str:
    drafts = not inventory.drafter and any(plain(name).startswith("draft.") for name in strange)
    return " A drafter with a checkpoint of its own is refitted if launched with drafter='trained'." if drafts else ""


def _each_once(offer: Offer, rows: list[Routed]) -> None:
    repeated = {name for name, n in Counter(row.spec.name for row in rows).items() if n > 1}
    if repeated:
        sources = {offer.tensors[row.index].name for row in rows if row.spec.name in repeated}
        raise RepeatedTensors(
            f"{len(repeated)} tensors are offered more than once: {names(list(repeated))} (as {names(list(sources))})",
            tensor=min(repeated),
        )


def _cut_short(inventory: Inventory, sent: Mapping[str, int]) -> list[str]:
    """Name what is missing of optional groups of which something is there."""
    begun = [group for group in inventory.optional if any(spec.name in sent for spec in group)]
    return [spec.name for group in begun for spec in group if spec.name not in sent]


def _twin_sent(name: str, inventory: Inventory, sent: Mapping[str, int]) -> bool:
    base = inventory.tied.get(name, name)
    group = {base} | {twin for twin, other in inventory.tied.items() if other == base}
    return any(member in sent for member in group)


def _is_padded(sent: TensorSpec, wanted: TensorSpec, inventory: Inventory) -> bool:
    if wanted.name not in inventory.vocabulary or not sent.shape or not wanted.shape:
        return False
    return sent.shape[0] > wanted.shape[0] and sent.shape[1:] == wanted.shape[1:]


def _trimmed(row: Routed, offer: Offer, inventory: Inventory) -> Routed:
    if offer.vocabulary == "trim" and _is_padded(offer.tensors[row.index], row.spec, inventory):
        return replace(row, start=0)
    return row


def _same_shape(offer: Offer, rows: list[Routed], inventory: Inventory) -> None:
    shapes: dict[str, str] = {}
    remedies = set()
    for row in rows:
        sent, wanted = offer.tensors[row.index], row.spec
        if row.start is None and tuple(sent.shape) != tuple(wanted.shape):
            shapes[wanted.name] = f"{wanted.name} is {list(sent.shape)}, not {list(wanted.shape)}"
            if _is_padded(sent, wanted, inventory):
                remedies.add('; if the rows beyond are padding, pass vocabulary="trim"')
            elif len(sent.shape) > 1 and (*sent.shape[:-2], sent.shape[-1], sent.shape[-2]) == tuple(wanted.shape):
                remedies.add("; where the last two lengths are exchanged, publish the transposed tensor")
    if shapes:
        said = names(list(shapes.values()))
        raise ShapeMismatch(
            f"{len(shapes)} shapes differ from the model's: {said}{''.join(sorted(remedies))}", tensor=min(shapes)
        )


def _same_dtype(offer: Offer, rows: list[Routed]) -> None:
    dtypes: dict[str, str] = {}
    lossy: dict[str, str] = {}
    for row in rows:
        sent, wanted = offer.tensors[row.index], row.spec
        castable = offer.cast == "inventory" and {sent.dtype, wanted.dtype} <= _FLOATS
        if sent.dtype != wanted.dtype and not castable:
            wrong = lossy if offer.cast else dtypes
            wrong[wanted.name] = f"{wanted.name} is {sent.dtype}, not {wanted.dtype}"
    if dtypes:
        said = names(list(dtypes.values()))
        raise DtypeMismatch(
            f'{len(dtypes)} dtypes differ from the model\'s: {said}; pass cast="inventory" to have '
            "floating-point tensors cast to the model's dtypes before they are sent",
            tensor=min(dtypes),
        )
    if lossy:
        raise DtypeMismatch(f"{len(lossy)} tensors cannot be cast: {names(list(lossy.values()))}", tensor=min(lossy))


def unequal_ties(manifest: Manifest, trailer: Trailer) -> list[str]:
    """Name the tied tensors that were sent with different content."""
    return [
        f"{manifest.rows[a].spec.name} and {manifest.rows[b].spec.name}"
        for a, b in manifest.equal
        if trailer.digests[a] != trailer.digests[b]
    ]


def content_of(manifest: Manifest, trailer: Trailer, tied: Mapping[str, str]) -> Content:
    """Return what a version consists of, in whatever order or form it was sent.

    Raises:
        RefitFailed: the trailer is not one of this manifest.
        TiedTensorsDiffer: tensors that the model ties were sent with different content.
    """
    if len(trailer.digests) != len(manifest.rows):
        raise RefitFailed(f"the trailer has {len(trailer.digests)} digests for {len(manifest.rows)} tensors")
    if differing := unequal_ties(manifest, trailer):
        raise TiedTensorsDiffer(f"tied tensors were sent with different content: {differing[0]}")
    called = (tied.get(row.spec.name, row.spec.name) for row in manifest.rows)
    return dict(zip(called, trailer.digests, strict=True))


class Outcome(Enum):
    """How a refit ended."""

    COMMITTED = "committed"  #: every replica that lives serves the version
    PARTIAL = "partial"  #: some replicas serve it, others failed
    FAILED = "failed"  #: no replica serves it
    SUPERSEDED = "superseded"  #: a newer version took its place before any replica began


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica's part. `seconds` by phase (stage, suspend, receive, finalize, resume); `bubble` in seconds.

    What is received in place has no stage.
    The bubble is the wall time from the last token before the suspend to the first after the resume; None when
    no request was in flight throughout. `ways` says how its tensors got into the live parameters; None where that is
    not known. `acceptance` is how drafts fared under the version that was replaced; None without drafts.
    """

    replica: str
    committed: bool
    seconds: Mapping[str, float]
    live: int = 0
    bubble: float | None = None
    error: PitstopError | None = None
    ways: Ways | None = None
    acceptance: Acceptance | None = None


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What became of a refit. `seconds` is from the offer to the end, `sent_seconds` to the source being free.

    `mode` is None if it ended before that was decided. `staging` says in which memory the version waited for its swap
    (`worker_ports.Staging`), and `staging_reason`, for people, what led to that, or to none.
    """

    refit_id: str
    weight_version: int
    outcome: Outcome
    transport: str
    nbytes: int
    tensors: int
    seconds: float
    sent_seconds: float
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    error: PitstopError | None = None
    mode: Literal["staged", "in_place"] | None = None
    staging: Staging = ""
    staging_reason: str = ""

    @property
    def bubble(self) -> float | None:
        """The longest bubble of any replica, in seconds."""
        return max((r.bubble for r in self.replicas.values() if r.bubble is not None), default=None)

    @property
    def phase_seconds(self) -> dict[str, float]:
        """The longest time any replica spent in each phase, in seconds."""
        out: dict[str, float] = {}
        for report in self.replicas.values():
            for phase, seconds in report.seconds.items():
                out[phase] = max(out.get(phase, 0.0), seconds)
        return out


def outcome(replicas: Mapping[str, ReplicaReport]) -> Outcome:
    """Judge a refit by its replicas."""
    done = [report.committed for report in replicas.values()]
    if not any(done):
        return Outcome.FAILED
    return Outcome.COMMITTED if all(done) else Outcome.PARTIAL


def facts(report: RefitReport) -> dict[str, str | int | float]:
    """Return what a refit's span says at its end; what is not known is left out."""
    found = {
        "outcome": report.outcome.value, "replicas": len(report.replicas), "seconds": report.seconds,
        "mode": report.mode, "staging": report.staging or None, "staging_reason": report.staging_reason or None,
        "bubble": report.bubble,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def summary(report: RefitReport) -> dict[str, Any]:
    """Flatten a report for logs and spans."""
    return {
        "weight_version": report.weight_version,
        "outcome": report.outcome.value,
        "transport": report.transport,
        "nbytes": report.nbytes,
        "seconds": round(report.seconds, 6),
        **{f"{k}_s": round(v, 6) for k, v in report.phase_seconds.items()},
    }
