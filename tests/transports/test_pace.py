"""A ring's pace and its cut, as properties."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitstop.engine.errors import InvalidRequest, OfferRejected, ProtocolViolation
from pitstop.engine.worker_ports import ITEMSIZE, Manifest, Offer, TensorSpec, Ticket, WorkerLayout
from pitstop.transports.buckets import ALIGNMENT, cut
from pitstop.transports.messages import Drained, Lend, Report
from pitstop.transports.pace import Pace
from pitstop.transports.room import Buffers, choose, pace
from pitstop.transports.seats import Pacing, Seated, Underway

GIB = 1 << 30
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
specs = st.lists(st.builds(TensorSpec, st.text(max_size=3), st.sampled_from(sorted(ITEMSIZE)), shapes), max_size=30)


@settings(deadline=None)
@given(specs, st.integers(1, 20))
def test_a_cut_has_every_element_once_in_order_and_fits_its_slots(tensors: list[TensorSpec], blocks: int) -> None:
    nbytes = blocks * ALIGNMENT
    seen = [0] * len(tensors)
    last = -1
    for bucket in cut(tensors, nbytes):
        end = 0
        assert bucket
        for part in bucket:
            width = ITEMSIZE[tensors[part.row].dtype]
            assert part.offset % ALIGNMENT == 0
            assert part.offset >= end
            end = part.offset + part.count * width
            assert end <= nbytes
            assert part.start == seen[part.row]
            assert part.row >= last
            last = part.row
            seen[part.row] += part.count
    assert seen == [prod(spec.shape) for spec in tensors]
    assert {part.row for bucket in cut(tensors, nbytes) for part in bucket} == set(range(len(tensors)))


@settings(deadline=None)
@given(st.data())
def test_no_slot_is_written_again_before_every_reader_that_is_in_is_done_with_it(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 4))
    pace = Pace(buckets := data.draw(st.integers(1, 12)), slots, clock=lambda: 0.0)
    readers = dict.fromkeys("abc"[: data.draw(st.integers(1, 3))], 0)
    for name in readers:
        pace.join(name)
    for _ in range(data.draw(st.integers(0, 60))):
        act = data.draw(st.sampled_from(["fill", "drain", "leave"]))
        if act == "fill":
            wanted = data.draw(st.integers(0, buckets + 1))
            slowest = min(readers.values(), default=pace.drained)
            if pace.filled <= wanted <= min(buckets, slowest + slots):
                pace.fill(wanted)
            else:
                with pytest.raises(ProtocolViolation):
                    pace.fill(wanted)
        elif readers:
            name = data.draw(st.sampled_from(sorted(readers)))
            if act == "leave":
                del readers[name]
                pace.leave(name)
                continue
            wanted = data.draw(st.integers(0, buckets + 1))
            if readers[name] <= wanted <= pace.filled:
                readers[name] = wanted
                pace.drain(name, wanted)
            else:
                with pytest.raises(ProtocolViolation):
                    pace.drain(name, wanted)
        assert pace.drained <= pace.filled <= pace.drained + slots
        if readers:
            assert pace.drained == min(readers.values())


def test_who_comes_when_the_first_bucket_is_written_has_missed_it() -> None:
    pace = Pace(3, 2)
    pace.join("early")
    pace.fill(1)
    with pytest.raises(ProtocolViolation, match="late came when 1 of 3"):
        pace.join("late")


def test_a_reader_is_overdue_from_when_it_had_something_to_do() -> None:
    now = 0.0
    pace = Pace(9, 2, clock=lambda: now)
    pace.join("quick")
    pace.join("slow")
    now = 100.0
    assert not pace.overdue(5)
    pace.fill(1)
    pace.drain("quick", 1)
    now = 106.0
    assert pace.overdue(5) == ["slow"]
    pace.drain("slow", 1)
    assert not pace.overdue(5)
    now = 200.0
    pace.fill(2)
    assert not pace.overdue(5)
    now = 206.0
    assert pace.overdue(5) == ["quick", "slow"]


def layout(device: str = "", spare: int = 0) -> WorkerLayout:
    return WorkerLayout("r0", 1, 0, 1, 1, "cpu", device, spare)


@pytest.mark.parametrize(
    ("nbytes", "device", "mode", "free", "name", "in_place"),
    [
        (1 * GIB, "", "auto", 8 * GIB, "shared_memory", False),
        (1 * GIB, "", "in_place", 8 * GIB, "shared_memory_ring", True),
        (6 * GIB, "", "auto", 8 * GIB, "shared_memory_ring", False),
        (8 * GIB, "", "auto", 8 * GIB, "shared_memory_ring", True),
        (6 * GIB, "cuda:a", "auto", 8 * GIB, "cuda_ipc", False),
        (6 * GIB, "cuda:a", "in_place", 8 * GIB, "cuda_ipc", True),
        (60 * GIB, "cuda:a", "auto", 90 * GIB, "cuda_ipc", True),
        (1 * GIB, "cuda:b", "auto", 8 * GIB, "shared_memory", False),
    ],
)
def test_the_way_follows_from_size_place_and_wish(
    nbytes: int, device: str, mode: str, free: int, name: str, *, in_place: bool
) -> None:
    buffers = Buffers(most_nbytes=4 * GIB)
    way = choose(nbytes, device, [layout("cuda:a", 20 * GIB)], mode, buffers, free, "this machine")  # type: ignore[arg-type]
    assert (way.name, way.in_place) == (name, in_place)
    assert bool(way.slots) is (name != "shared_memory")


@pytest.mark.parametrize(
    ("nbytes", "mode", "free", "most", "staging", "why"),
    [
        (6, "auto", 8, None, "device", "of which 20.00 GiB are free"),
        (6, "in_place", 99, None, "none", "in place was asked for"),
        (19, "auto", 99, None, "host", "staging needs 20.38 GiB: it waits in host memory, 19.00 GiB"),
        (19, "staged", 99, 19 * GIB, "host", "host memory, 19.00 GiB"),
        (19, "auto", 99, 18 * GIB, "none", "in host memory it needs 19.00 GiB, of 18.00 GiB (Buffers.most_nbytes)"),
        (19, "auto", 19, None, "none", "in host memory it needs 19.00 GiB, of 18.75 GiB (limit of this machine)"),
    ],
)
def test_a_version_is_staged_where_there_is_room_and_the_reason_says_what_decided(
    nbytes: int, mode: str, free: int, most: int | None, staging: str, why: str
) -> None:
    buffers = Buffers(most_nbytes=most)
    way = choose(
        nbytes * GIB, "cuda:a", [layout("cuda:a", 20 * GIB)], mode, buffers, free * GIB, "this machine"  # type: ignore[arg-type]
    )  # fmt: skip
    assert (way.name, way.staging) == ("cuda_ipc", staging)
    assert why in way.why


def test_two_receivers_of_a_gpu_need_twice_the_room_and_what_they_keep_of_host_memory_counts_as_free() -> None:
    both, buffers = [layout("cuda:a", 20 * GIB)] * 2, Buffers()
    assert choose(9 * GIB, "cuda:a", both, "auto", buffers, 99 * GIB, "this machine").staging == "device"
    assert choose(10 * GIB, "cuda:a", both, "auto", buffers, 21 * GIB, "this machine").staging == "host"
    assert choose(10 * GIB, "cuda:a", both, "auto", buffers, 20 * GIB, "this machine").staging == "none"
    assert choose(10 * GIB, "cuda:a", both, "auto", buffers, 20 * GIB, "this machine", 1 * GIB).staging == "host"


@pytest.mark.parametrize(
    ("device", "mode", "rate", "receivers", "limits", "found"),
    [
        ("cuda:a", "staged", 19 * GIB, 1, (120.0, 5.0), 19 * GIB),
        ("cuda:a", "staged", 19 * GIB, 2, (120.0, 5.0), 19 * GIB // 2),  # together, since they share it
        ("cuda:a", "staged", None, 1, (120.0, 5.0), 0),
        ("cuda:a", "in_place", 19 * GIB, 1, (120.0, 5.0), 0),  # nobody is served that could be slowed down
        ("", "staged", 19 * GIB, 1, (120.0, 5.0), 0),
        ("cuda:a", "staged", 1, 1, (120.0, 5.0), (128 << 20) // 15),  # or it would be evicted over a bucket
    ],
)
def test_only_what_is_staged_on_a_gpu_that_serves_is_paced_and_never_so_slowly_that_it_is_evicted(
    device: str, mode: str, rate: int | None, receivers: int, limits: tuple[float, float], found: int
) -> None:
    buffers, all_of_them = Buffers(stage_nbytes_per_s=rate), [layout("cuda:a", 20 * GIB)] * receivers
    way = choose(2 * GIB, device, all_of_them, mode, buffers, 99 * GIB, "this machine")  # type: ignore[arg-type]
    assert pace(way, buffers, receivers, limits) == found


@pytest.mark.parametrize(("device", "free"), [("", 2 * GIB), ("cuda:a", 2 * GIB)])
def test_staging_that_fits_nowhere_is_refused_and_says_what_would_do(device: str, free: int) -> None:
    with pytest.raises(OfferRejected, match="in_place"):
        choose(3 * GIB, device, [layout("cuda:a", 3 * GIB)], "staged", Buffers(), free, "this machine")


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"slots": 2000},
        {"slot_nbytes": 100},
        {"most_nbytes": -1},
        {"stage_nbytes_per_s": 0},
        {"stage_nbytes_per_s": 1.5},
    ],
)
def test_buffers_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        Buffers(**wrong)


class Heard:
    """A client as far as a seat needs one."""

    beats = True
    heard_at = 0.0

    def __init__(self) -> None:
        self.messages: list[object] = []

    def post(self, message: object) -> bool:
        self.messages.append(message)
        return True


def lending() -> tuple[Underway, Pacing]:
    refit = Underway(Offer("r", 1, ()), Manifest(()), None, (60.0, 5.0))
    refit.paced(3, 2, lent_nbytes=1024)
    assert refit.ring is not None
    return refit, refit.ring


def test_a_ring_of_a_gpu_is_lent_once_large_enough_and_before_anything_is_written() -> None:
    _, ring = lending()
    with pytest.raises(ProtocolViolation, match="never lent"):
        ring.filled(1)
    with pytest.raises(ProtocolViolation, match="1023 bytes was lent, where 1024"):
        ring.lent(bytes(64), 1023)
    ring.lent(bytes(64), 1024)
    with pytest.raises(ProtocolViolation, match="lent before"):
        ring.lent(bytes(64), 1024)
    ring.filled(1)


def test_a_receiver_that_comes_after_the_ring_was_lent_hears_of_it() -> None:
    refit, ring = lending()
    ring.lent(bytes(64), 1024)
    seat = Seated(refit, Ticket("r", "r0", 1, 0, "", "", 1024, (), "", "t", 60.0, 5.0, 2, 512, "cuda:a"))
    client: Any = Heard()
    seat.welcomed(client)
    assert client.messages == [Lend("r", bytes(64), 1024)]


def test_a_receiver_that_attaches_when_the_ring_is_being_filled_is_refused_and_holds_up_nobody() -> None:
    refit = Underway(Offer("r", 1, ()), Manifest(()), None, (60.0, 5.0))
    refit.paced(3, 2)
    assert refit.ring is not None
    early, late = (
        Seated(refit, Ticket("r", "r0", 1, rank, "", "", 1024, (), "", str(rank), 60.0, 5.0, 2, 512)) for rank in (0, 1)
    )
    early.heard(Report("r", "attached"))
    refit.ring.filled(2)
    with pytest.raises(ProtocolViolation, match="came when 2 of 3"):
        late.heard(Report("r", "attached"))
    early.heard(Drained("r", 2))
    assert refit.ring.drained == 2
