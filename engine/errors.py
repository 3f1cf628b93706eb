"""Everything Pitstop raises.

    PitstopError
    ├── LocalError                the caller broke a rule; nothing was changed
    │   ├── IllegalEvent          an event that the lifecycle table does not have
    │   ├── InvalidRequest        a generation request that cannot run (also a ValueError)
    │   ├── OfferRejected         a refit whose tensors do not fit the inventory
    │   │   ├── MissingTensors, UnexpectedTensors, RepeatedTensors
    │   │   ├── ShapeMismatch, DtypeMismatch, TiedTensorsDiffer
    │   │   ├── AdapterRejected
    │   │   └── StaleVersion
    │   ├── CheckpointUnreadable, KeyUnreadable, MergeUnproven
    │   ├── EngineClosed, NotServing, UnsupportedPolicy, PublishOrder
    │   ├── EngineArgumentRejected  (in `vllm_backend`)
    │   └── AlreadyConfigured       (in `pitstop.telemetry`)
    └── RemoteError               a peer, a worker or an engine failed
        ├── DeadlineExceeded, PeerLost, AccessDenied, ReplicaDied, WorkerFailed
        ├── DigestMismatch, ProtocolViolation, CacheResetRefused
        ├── WeightsDrifted, ReadingCutShort
        └── RefitFailed

`slug` is stable and is what telemetry records as `error.type`. An error crosses a process border as an
`ErrorRecord` (slug, message, fields) and is rebuilt by `from_record`: never by pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ClassVar

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as plain data: what travels between processes."""

    slug: str
    message: str
    fields: dict[str, str | int | float | None] = field(default_factory=dict)
    traceback: str = ""


class PitstopError(Exception):
    """Base of all errors of this package.

    Attributes:
        slug: stable, low-cardinality name of the kind.
        fields: the facts in the message as plain data (replica, phase, peer, tensor, seconds, ...).
        remote_traceback: text of the traceback in the process where it happened, if another one.
    """

    slug: ClassVar[str] = "error"

    def __init__(self, message: str, /, **fields: str | int | float | None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        self.remote_traceback = ""

    def record(self) -> ErrorRecord:
        """Return this error as plain data."""
        return ErrorRecord(self.slug, self.message, dict(self.fields), self.remote_traceback)

    def about(self, **facts: str | int | float | None) -> PitstopError:
        """Return a copy with these facts as well, where it lacks them: one error may end several replicas' parts."""
        record = self.record()
        told = from_record(replace(record, fields=facts | record.fields))
        told.__cause__, told.__traceback__ = self.__cause__, self.__traceback__
        return told

    def __reduce__(self) -> tuple[Any, ...]:
        return from_record, (self.record(),)


class LocalError(PitstopError):
    """The caller broke a rule."""

    slug = "local_error"


class RemoteError(PitstopError):
    """A peer, a worker or an engine failed."""

    slug = "remote_error"


class IllegalEvent(LocalError):
    """Raised when an event reaches a state whose table row does not name it."""

    slug = "illegal_event"


class InvalidRequest(LocalError, ValueError):
    """Raised when a generation request cannot run; the fleet is unaffected."""

    slug = "invalid_request"


class EngineClosed(LocalError):
    """Raised when an engine is used outside its `async with` block."""

    slug = "engine_closed"


class NotServing(LocalError):
    """Raised when no replica can serve and none will without the caller's help; says which step is missing."""

    slug = "not_serving"


class UnsupportedPolicy(LocalError, ValueError):
    """Raised when an option names a policy that this version does not have."""

    slug = "unsupported_policy"


class PublishOrder(LocalError):
    """Raised when the ranks of a trainer do not publish the same versions in the same order."""

    slug = "publish_order"


class CheckpointUnreadable(LocalError):
    """Raised when a checkpoint folder is absent, incomplete, half-written, or changed while it was read."""

    slug = "checkpoint_unreadable"


class KeyUnreadable(LocalError):
    """Raised when the key of a TCP address is absent, not private, or not a key. Fields: key (its path)."""

    slug = "key_unreadable"


class OfferRejected(LocalError):
    """Raised when a refit's declared tensors do not fit. Nothing was suspended or changed."""

    slug = "offer_rejected"


class MissingTensors(OfferRejected):
    """Raised when the inventory has tensors that the offer lacks."""

    slug = "missing_tensors"


class UnexpectedTensors(OfferRejected):
    """Raised when the offer has tensors that map nowhere in the inventory."""

    slug = "unexpected_tensors"


class RepeatedTensors(OfferRejected):
    """Raised when several offered tensors map to one of the inventory."""

    slug = "repeated_tensors"


class ShapeMismatch(OfferRejected):
    """Raised when shapes differ from the inventory's."""

    slug = "shape_mismatch"


class DtypeMismatch(OfferRejected):
    """Raised when dtypes differ from the inventory's and no cast was asked for."""

    slug = "dtype_mismatch"


class TiedTensorsDiffer(OfferRejected):
    """Raised when two tensors that the model shares were sent with different content."""

    slug = "tied_tensors_differ"


class StaleVersion(OfferRejected):
    """Raised when an offered version is not newer than the newest one accepted."""

    slug = "stale_version"


class AdapterRejected(OfferRejected):
    """Raised when an adapter cannot be merged into the tensors it is for. Fields: tensor (or the layer)."""

    slug = "adapter_rejected"


class MergeUnproven(LocalError):
    """Raised when a tensor with its adapter merged in is not what the two compute, or not finite. Fields: tensor."""

    slug = "merge_unproven"


class DeadlineExceeded(RemoteError):
    """Raised when a phase or a control call did not end in time.

    Fields: replica, phase, peer, tensor (where known), seconds (the limit).
    """

    slug = "deadline_exceeded"


class PeerLost(RemoteError):
    """Raised when a peer died, closed its link, or went silent. Fields: peer, seconds."""

    slug = "peer_lost"


class AccessDenied(RemoteError):
    """Raised when an engine does not accept the key that a client shows. Fields: peer, key (its path)."""

    slug = "access_denied"


class ReplicaDied(RemoteError):
    """Raised when a replica's engine died under a request or a call. Fields: replica."""

    slug = "replica_died"


class WorkerFailed(RemoteError):
    """Raised when a worker process reported an error of its own. Fields: replica, rank, operation, kind."""

    slug = "worker_failed"


class DigestMismatch(RemoteError):
    """Raised when received bytes are not the bytes that were sent. Fields: tensor, count."""

    slug = "digest_mismatch"


class WeightsDrifted(RemoteError):
    """Raised when live weights are no longer what they were at their commit.

    Fields: replica, rank, tensor (the first of them), count, weight_version.
    """

    slug = "weights_drifted"


class ReadingCutShort(RemoteError):
    """Raised when live weights were about to change or go while they were read. Fields: rank."""

    slug = "reading_cut_short"


class ProtocolViolation(RemoteError):
    """Raised when a peer sent what the protocol does not allow at this point."""

    slug = "protocol_violation"


class CacheResetRefused(RemoteError):
    """Raised when an engine answered a cache reset with no."""

    slug = "cache_reset_refused"


class RefitFailed(RemoteError):
    """Raised when a refit ended without a commit and no single error says why."""

    slug = "refit_failed"


def _tree(root: type[PitstopError]) -> dict[str, type[PitstopError]]:
    return {root.slug: root} | {k: v for child in root.__subclasses__() for k, v in _tree(child).items()}


def from_record(record: ErrorRecord) -> PitstopError:
    """Rebuild an error from its record; an unknown slug becomes a plain `RemoteError`."""
    error = _tree(PitstopError).get(record.slug, RemoteError)(record.message, **record.fields)
    error.remote_traceback = record.traceback
    return error


def names(items: Sequence[str], *, shown: int = _SHOWN) -> str:
    """Render a bounded, sorted list of names for a message."""
    listed = ", ".join(sorted(items)[:shown])
    return listed if len(items) <= shown else f"{listed} and {len(items) - shown} more"


def near(name: str, candidates: Sequence[str]) -> list[str]:
    """Return up to three candidates that look like `name`."""
    return get_close_matches(name, candidates, n=3, cutoff=0.75)


def hint(matches: Mapping[str, Sequence[str]]) -> str:
    """Render near matches as a sentence, empty when there are none."""
    said = [f"{name} (did you mean {', '.join(found)}?)" for name, found in sorted(matches.items()) if found]
    return " " + "; ".join(said[:_SHOWN]) if said else ""
