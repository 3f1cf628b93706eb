"""Shared memory: laid out without overlap, sealed, reused only when nobody can touch it, gone with its last user."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine.errors import LocalError, OfferRejected, PeerLost, ProtocolViolation, WorkerFailed
from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec
from pitstop.transports import memory, pool
from pitstop.transports.buckets import ALIGNMENT, place
from pitstop.transports.memory import available
from pitstop.transports.packing import Proof, Slot, checked
from pitstop.transports.pool import WRITING, SegmentPool
from pitstop.transports.segment import Kept, Mapping, Probe, Segment, why_not
from tests.transports.children import descriptors

specs = st.lists(
    st.builds(
        TensorSpec,
        st.text(max_size=5),
        st.sampled_from(sorted(ITEMSIZE)),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    max_size=20,
)


@given(specs)
def test_tensors_are_aligned_and_do_not_overlap(declared: list[TensorSpec]) -> None:
    placed, nbytes = place(declared)
    assert [p.spec for p in placed] == declared
    end = 0
    for p in placed:
        assert p.offset % ALIGNMENT == 0
        assert p.offset >= end
        end = p.offset + p.spec.nbytes
    assert end <= nbytes <= end + ALIGNMENT


def test_readers_see_what_the_writer_writes_and_cannot_change_it() -> None:
    segment = Segment(4096)
    write, read = Mapping(segment.path, 4096, "write"), Mapping(segment.path, 4096, "read")
    write.bytes[:8] = 7
    tensor = read.tensor("int16", (2, 2), 0)
    assert tensor.tolist() == [[0x0707, 0x0707]] * 2
    tensor.fill_(1)
    assert write.bytes[:8].tolist() == [7] * 8
    segment.close()
    segment.close()
    assert write.bytes[:8].tolist() == [7] * 8


def test_a_view_outlives_the_mapping_and_the_segment() -> None:
    segment = Segment(1 << 20)
    write = Mapping(segment.path, 1 << 20, "write")
    write.bytes[:] = 3
    view = Mapping(segment.path, 1 << 20, "read").tensor("uint8", (1 << 20,), 0)
    segment.close()
    del write
    gc.collect()
    assert int(view.sum()) == 3 << 20


def test_a_segment_cannot_be_resized_by_anyone() -> None:
    segment = Segment(4096)
    fd = os.open(segment.path, os.O_RDWR)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    segment.close()


def test_a_mapping_is_kept_until_there_is_another_segment() -> None:
    first, second, kept = Segment(4096), Segment(8192), Kept("read")
    mapping = kept.take("engine", first.path, 4096)
    assert kept.take("engine", first.path, 4096) is mapping
    assert kept.take("engine", first.path, 4096, fresh=True) is not mapping
    assert kept.take("another", first.path, 4096) is not mapping
    other = kept.take("engine", second.path, 8192)
    assert other.key != mapping.key
    assert other.nbytes == 8192
    first.close()
    second.close()


def test_a_path_that_was_given_to_another_segment_is_not_mistaken_for_the_old_one() -> None:
    kept, first = Kept("read"), Segment(4096)
    path = first.path
    mapping = kept.take("engine", path, 4096)
    first.close()
    second = Segment(4096)
    assert second.path == path, "this test needs the kernel to hand out the number again"
    assert kept.take("engine", path, 4096) is not mapping
    second.close()


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/fd/0", "/dev/shm/x", "/proc/1/fd/../environ", ""])
def test_nothing_but_segments_is_opened(path: str) -> None:
    with pytest.raises(LocalError):
        Mapping(path, 1, "read")


def test_foreign_and_dead_segments_say_what_is_wrong(tmp_path: Path) -> None:
    unsealed = os.memfd_create("pitstop-loose", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(WorkerFailed, match="not a sealed segment"):
        Mapping(f"/proc/{os.getpid()}/fd/{unsealed}", 4096, "read")
    os.close(unsealed)
    segment = Segment(4096)
    with pytest.raises(WorkerFailed, match="not a sealed segment of 8192 bytes"):
        Mapping(segment.path, 8192, "read")
    path = segment.path
    segment.close()
    with pytest.raises(PeerLost):
        Mapping(path, 4096, "read")
    with (tmp_path / "file").open("wb") as file, pytest.raises(LocalError, match="not a segment"):
        Mapping(f"/proc/{os.getpid()}/fd/{file.fileno()}", 1, "read")


def test_a_probe_tells_whether_memory_is_shared() -> None:
    probe = Probe()
    assert why_not(probe.path, probe.nonce) is None
    assert "something else" in str(why_not(probe.path, bytes(32)))
    path = probe.path
    probe.close()
    assert "gone" in str(why_not(path, probe.nonce))


def test_a_forked_child_does_not_keep_segments() -> None:
    segment = Segment(4096)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send([d for d in descriptors() if "memfd" in d]))
    child.start()
    assert ours.poll(10)
    assert ours.recv() == []
    child.join(10)
    assert os.path.exists(segment.path)
    segment.close()


# -- the pool ------------------------------------------------------------------------------------------------


def inode(lease: pool.Lease) -> int:
    return os.stat(lease.segment.path).st_ino


def test_a_segment_is_used_again_when_everyone_has_let_go() -> None:
    segments = SegmentPool()
    first = segments.take("r1", 4096)
    first.readers.add("token")
    first.over = True
    known = inode(first)
    first.readers.discard("token")
    second = segments.take("r2", 100)
    assert inode(second) == known
    second.over = True
    assert inode(segments.take("r3", 8192)) != known
    segments.close()


@pytest.mark.parametrize("still", ["reading", "writing", "under way"])
def test_a_segment_that_somebody_may_touch_is_never_used_again(still: str) -> None:
    segments = SegmentPool()
    first = segments.take("r1", 4096)
    known = inode(first)
    first.over = still != "under way"
    if still == "reading":
        first.readers.add("token")
    if still == "writing":
        WRITING.add("r1")
    assert inode(segments.take("r2", 4096)) != known
    WRITING.discard("r1")
    segments.close()


def test_no_room_is_said_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "available", lambda: (300 << 20, "control group /job"))
    segments = SegmentPool()
    with pytest.raises(
        OfferRejected, match=r"needs 1\.00 GiB .* only 0\.29 GiB can be had \(limit of control group /job\)"
    ):
        segments.take("r1", 1 << 30)
    segments.take("r2", 1 << 20)
    segments.close()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 100 kB\nMemAvailable:   1000 kB\n"


def test_available_memory_is_the_tightest_limit(tmp_path: Path) -> None:
    assert available(tmp_path / "nothing") == (1 << 62, "nothing")
    assert available(write(tmp_path / "plain", {"proc/meminfo": MEMINFO}))[0] == 1024_000
    second = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "5\n",
        "sys/fs/cgroup/job/memory.max": "1000\n",
        "sys/fs/cgroup/job/memory.current": "800\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 300\n",
    }
    assert available(write(tmp_path / "v2", second)) == (500, "control group /sys/fs/cgroup/job")
    first = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "900\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "950\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 10\n",
    }
    assert available(write(tmp_path / "v1", first)) == (0, "control group /sys/fs/cgroup/memory")
    assert available()[0] > memory.HEADROOM


# -- what the engine asks for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slots",
    [
        [Slot(2, "int8", 0)],
        [Slot(0, "int8", 97)],
        [Slot(0, "float64", 0)],
        [Slot(0, "int8", 512), Slot(1, "int8", 511)],
        [Slot(0, "int8", 0), Slot(1, "int8", 3)],
    ],
    ids=["no such tensor", "beyond the end", "too wide", "backwards", "overlapping"],
)
def test_places_that_do_not_fit_are_refused(slots: list[Slot]) -> None:
    declared = [TensorSpec("a", "int8", (30,)), TensorSpec("b", "int8", (10,))]
    with pytest.raises(ProtocolViolation):
        checked(declared, slots, 100 if len(slots) == 1 else 4096)
    checked(declared, [Slot(0, "int8", 0), Slot(1, "int8", 30)], 40)


def test_a_proof_looks_only_inside_the_segment() -> None:
    segment = Segment(512)
    mapping = Mapping(segment.path, 512, "read")
    placed, _ = place([TensorSpec("a", "int8", (513,))])
    with pytest.raises(ProtocolViolation):
        Proof(placed, mapping)
    placed, _ = place([TensorSpec("a", "int8", (5,))])
    with pytest.raises(ProtocolViolation, match="2 digests for 1 tensors"):
        list(Proof(placed, mapping).differing([1, 2]))
    assert np.count_nonzero(mapping.bytes) == 0
    segment.close()
