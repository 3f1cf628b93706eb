"""Which way a version takes to its receivers: decided from what is known before anything is suspended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal

from pitstop.engine.errors import InvalidRequest, OfferRejected
from pitstop.engine.worker_ports import Mode, Staging, WorkerLayout
from pitstop.transports.buckets import ALIGNMENT
from pitstop.transports.memory import HEADROOM
from pitstop.transports.messages import MOST_SLOTS
from pitstop.transports.pace import patience

_GIB: Final = 1 << 30
_DEVICE_HEADROOM: Final = 1 << 30
_MAY_BE_NONE: Final = frozenset({"most_nbytes", "stage_nbytes_per_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """How much memory a refit may use on its way. Sizes in bytes.

    A version of at most `most_nbytes` (None: as much as there is) lies in one shared segment, from which it can be
    delivered again. A larger one travels in buckets through a ring of `slots` slots of `slot_nbytes`; on a GPU
    that trainer and engine share, always, in `device_slots` of `device_slot_nbytes`. A slot has to be worth
    the messages about it, and on a GPU the launch; the memory there is lent by the trainer.

    What is staged while a replica serves on a GPU goes at `stage_nbytes_per_s` (None: as fast as it can), all receivers
    of that GPU together, since it takes from the model's share of the memory's bandwidth; faster where it would come
    too late. If that GPU has no room for it, it waits in page-locked memory of the engine's, `most_nbytes` at most.
    """

    most_nbytes: int | None = None
    slots: int = 4
    slot_nbytes: int = 16 << 20
    device_slots: int = 3
    device_slot_nbytes: int = 128 << 20
    stage_nbytes_per_s: int | None = 12 << 30

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if (value is not None or item.name not in _MAY_BE_NONE) and type(value) is not int:
                raise InvalidRequest(f"{item.name} is {value!r}, not a whole number")
        for name in ("slots", "device_slots"):
            if not 1 <= (count := getattr(self, name)) <= MOST_SLOTS:
                raise InvalidRequest(f"{name} is {count}, not a number from 1 to {MOST_SLOTS}")
        for name in ("slot_nbytes", "device_slot_nbytes"):
            nbytes = getattr(self, name)
            if nbytes <= 0 or nbytes % ALIGNMENT:
                raise InvalidRequest(f"{name} is {nbytes}, not a positive multiple of {ALIGNMENT}")
        if self.most_nbytes is not None and self.most_nbytes < 0:
            raise InvalidRequest(f"most_nbytes is {self.most_nbytes}, below 0")
        if self.stage_nbytes_per_s is not None and self.stage_nbytes_per_s <= 0:
            raise InvalidRequest(f"stage_nbytes_per_s is {self.stage_nbytes_per_s}: above 0, or None for no limit")


@dataclass(frozen=True, slots=True)
class Way:
    """`why` is for people. `slots` is 0 where the version lies in the buffer as a whole."""

    name: Literal["shared_memory", "shared_memory_ring", "cuda_ipc"]
    staging: Staging
    slots: int
    slot_nbytes: int
    why: str

    @property
    def in_place(self) -> bool:
        """Whether it goes straight into the live parameters."""
        return self.staging == "none"


def choose(
    nbytes: int,
    device: str,
    receivers: Sequence[WorkerLayout],
    mode: Mode,
    buffers: Buffers,
    free: int,
    whose: str,
    kept: int = 0,
) -> Way:
    """Choose for `nbytes` on the trainer's `device`; `free` bytes of host memory are left, by `whose` limit.

    Beside those the receivers have `kept` bytes from the last staged ring, which only another one can use.

    Raises:
        OfferRejected: what `mode` asks for does not fit anywhere.
    """
    if shares_gpu(device, receivers):
        return _on_gpu(nbytes, device, receivers, mode, buffers, free, whose, kept)
    most = free - HEADROOM
    if mode != "in_place":
        limit = most if buffers.most_nbytes is None else min(most, buffers.most_nbytes)
        if nbytes <= limit:
            return Way("shared_memory", "shared_memory", 0, 0, f"it fits into {limit / _GIB:.2f} GiB")
        # A ring's receivers keep what they take out of it until the swap, each for itself.
        needs = nbytes * len(receivers) - kept + buffers.slots * buffers.slot_nbytes
        if needs <= most:
            return _ring(buffers, f"{nbytes / _GIB:.2f} GiB are more than the {limit / _GIB:.2f} allowed", "host")
        if mode == "staged":
            raise OfferRejected(
                f"the refit needs {min(needs, nbytes) / _GIB:.2f} GiB of memory and {HEADROOM / _GIB:.2f} GiB of "
                f"headroom, but only {free / _GIB:.2f} GiB can be had (limit of {whose}): mode in_place needs less",
                nbytes=nbytes, available=free,
            )  # fmt: skip
    if buffers.slots * buffers.slot_nbytes > most:
        raise OfferRejected(
            f"no memory for a ring of {buffers.slots} slots of {buffers.slot_nbytes} bytes: only {free / _GIB:.2f} GiB "
            f"can be had (limit of {whose})",
            nbytes=nbytes, available=free,
        )  # fmt: skip
    why = "asked for" if mode == "in_place" else f"only {free / _GIB:.2f} GiB can be had (limit of {whose})"
    return _ring(buffers, why, "none")


def shares_gpu(device: str, receivers: Sequence[WorkerLayout]) -> bool:
    """Whether trainer and receivers are all on one GPU. `device` is the trainer's, empty if it is on none."""
    return bool(device) and all(layout.device_id == device for layout in receivers)


def pace(way: Way, buffers: Buffers, receivers: int, limits: tuple[float, float]) -> int:
    """Return how many bytes a second each of so many receivers may stage; 0 for no limit.

    `limits` are receive and silence, in seconds: one that is slower over a bucket than others bear would be evicted.
    """
    if way.name != "cuda_ipc" or way.in_place or buffers.stage_nbytes_per_s is None:
        return 0
    least = way.slot_nbytes / (patience(*limits) / 2)
    return max(buffers.stage_nbytes_per_s // receivers, int(least), 1)


def _ring(buffers: Buffers, why: str, staging: Staging) -> Way:
    return Way("shared_memory_ring", staging, buffers.slots, buffers.slot_nbytes, why)


def _on_gpu(
    nbytes: int, device: str, receivers: Sequence[WorkerLayout], mode: Mode, buffers: Buffers, free: int, whose: str,
    kept: int,
) -> Way:  # fmt: skip
    def way(staging: Staging, why: str) -> Way:
        return Way("cuda_ipc", staging, buffers.device_slots, buffers.device_slot_nbytes, why)

    spare = min(layout.spare_nbytes for layout in receivers)
    why = f"trainer and engine share {device}, of which {spare / _GIB:.2f} GiB are free"
    if mode == "in_place":
        return way("none", f"{why}: in place was asked for")
    ring, all_of_them = buffers.device_slots * buffers.device_slot_nbytes, nbytes * len(receivers)
    needs = all_of_them + ring + _DEVICE_HEADROOM
    if needs <= spare:
        return way("device", why)
    why = f"{why}, and staging needs {needs / _GIB:.2f} GiB"
    most = free - HEADROOM + kept
    limit, by = most, f"limit of {whose}"
    if buffers.most_nbytes is not None and buffers.most_nbytes < most:
        limit, by = buffers.most_nbytes, "Buffers.most_nbytes"
    if all_of_them <= limit:
        return way("host", f"{why}: it waits in host memory, {all_of_them / _GIB:.2f} GiB")
    why = f"{why}; in host memory it needs {all_of_them / _GIB:.2f} GiB, of {max(0, limit) / _GIB:.2f} GiB ({by})"
    if mode == "staged":
        raise OfferRejected(
            f"{why}: ask for mode in_place, or leave the engine less memory for its cache",
            nbytes=needs, available=spare,
        )  # fmt: skip
    return way("none", why)
