"""The digest on a GPU: the arithmetic of its table, and both of its kernels over the host's memory.

Triton's runs in its interpreter, where Triton is installed and TRITON_INTERPRET=1; on a GPU see `tests/gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitstop.transports import digest_cuda
from pitstop.transports.digest import BLOCK, lanes, reference
from pitstop.transports.digest_cuda import CudaWork
from pitstop.transports.digest_table import (
    ALIGNED,
    BEGIN,
    CHUNK0,
    END,
    FIRST,
    NARROW,
    ROW,
    SOURCE,
    TARGET,
    WIDE,
    Parts,
    table,
)

CPU = torch.device("cpu")
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


@pytest.fixture(
    params=["torch", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter"))]
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    launch: digest_cuda.Launch | None = None
    if request.param == "triton":
        from pitstop.transports import digest_triton

        launch = digest_triton.launch
    keys = torch.from_numpy(lanes().view(np.int64).copy())
    monkeypatch.setattr(digest_cuda, "_prepared", {CPU: (launch, keys)})
    return str(request.param)


def column(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def work(
    sources: Sequence[torch.Tensor], width: int, starts: Sequence[int], targets: Sequence[torch.Tensor] = (),
    narrow: bool = False, rows: Sequence[int] | None = None, chunk: int = 2,
) -> list[int]:  # fmt: skip
    """Digest flat byte tensors, a row each, one bucket each."""
    n = len(sources)
    parts = Parts(
        np.arange(n),
        column(rows or range(n)),
        column([width] * n),
        column(starts),
        column([source.nbytes // (4 if narrow else width) for source in sources]),
        column([source.data_ptr() for source in sources]),
        column([target.data_ptr() for target in targets] or [0] * n),
        np.full(n, narrow),
    )
    done = CudaWork(CPU, max(parts.row, default=-1) + 1, parts, "source", chunk=chunk)
    for bucket in range(n):
        done.run(bucket, np.zeros(n, np.int64))
    return [int(value) for value in done.digests()]


def content(nbytes: int, skip: int = 0, seed: int = 0) -> torch.Tensor:
    """Bytes that begin `skip` behind an address that suits everything."""
    whole = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes + 64 + skip, np.uint8))
    begin = -whole.data_ptr() % 64 + skip
    return whole[begin : begin + nbytes]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("copies", [True, False])
def test_it_is_the_definition_whatever_the_size_the_place_and_the_start(
    kernel: str, width: int, skip: int, copies: bool
) -> None:
    counts = (0, 1, 3, 511, 1023, 1024, 1025, 2048, 5000)
    for start in (0, 1, 256, 1023, 3_000_000_001):
        sources = [content(count * width, skip, count) for count in counts]
        targets = [torch.full_like(source, 255) for source in sources] if copies else []
        found = work(sources, width, [start] * len(counts), targets)
        assert found == [reference(raw(source), width, start) for source in sources]
        assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=False))


def test_nothing_is_written_beside_a_target(kernel: str) -> None:
    for skip, start, count in ((0, 0, 1000), (2, 300, 3000), (16, 8, 2044)):
        around = torch.zeros(count * 2 + 256, dtype=torch.uint8)
        target = around[64 + skip : 64 + skip + count * 2]
        source = content(count * 2) | 1
        work([source], 2, [start], [target])
        assert torch.equal(target, source)
        assert not around[: 64 + skip].any()
        assert not around[64 + skip + count * 2 :].any()


def test_parts_of_a_row_add_up(kernel: str) -> None:
    whole = content(4 * 9000)
    edges = [0, 1, 1000, 1024, 5000, 9000]
    parts = [whole[low * 4 : high * 4] for low, high in pairwise(edges)]
    assert work(parts, 4, edges[:-1], rows=[0] * len(parts)) == [reference(raw(whole), 4)]


def test_a_cast_is_torchs_and_its_digest_that_of_the_result(kernel: str) -> None:
    special = [
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        3.3895e38,
        -3.4028e38,
        1e-45,
        1.00390625,
        1.01171875,
    ]
    bits = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 32, 3000, np.uint32).view(np.float32))
    wide = torch.cat([torch.tensor(special), bits])
    narrow = torch.zeros(wide.numel() * 2, dtype=torch.uint8)
    digest = work([wide.view(torch.uint8)], 2, [256], [narrow], narrow=True)
    expected, found = wide.to(torch.bfloat16), narrow.view(torch.bfloat16)
    numbers = ~expected.isnan()
    assert torch.equal(numbers, ~found.isnan())
    assert torch.equal(expected.view(torch.int16)[numbers], found.view(torch.int16)[numbers])
    assert digest == [reference(raw(narrow), 2, 256)]


def test_flips_and_swaps_are_noticed(kernel: str) -> None:
    whole = content(2 * 4000)
    wanted = work([whole], 2, [0])
    for change in (0, 1, 4001, 7999):
        damaged = whole.clone()
        damaged[change] ^= 1 << change % 8
        assert work([damaged], 2, [0]) != wanted
    swapped = whole.view(torch.int16).clone()
    swapped[[5, 3005]] = swapped[[3005, 5]]
    assert work([swapped.view(torch.uint8)], 2, [0]) != wanted


def test_the_kernels_try_out_passes_here(kernel: str) -> None:
    launch, keys = digest_cuda._prepared[CPU]
    if launch is not None:
        digest_cuda._try_out(launch, CPU, keys)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.from_numpy(lanes().view(np.int64).copy())
    with pytest.raises(ArithmeticError, match="digest is wrong"):
        digest_cuda._try_out(lambda *_: None, CPU, keys)


def test_torch_cuts_long_parts_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from pitstop.transports import digest_torch

    monkeypatch.setattr(digest_torch, "PIECE", 1500)
    source = content(2 * 10_000)
    assert work([source], 2, [777]) == [reference(raw(source), 2, 777)]


parts_ = st.lists(
    st.tuples(
        st.integers(0, 3),  # bucket
        st.sampled_from([(1, False), (2, False), (4, False), (8, False), (2, True)]),
        st.integers(0, 5000) | st.integers((1 << 32) - 5000, (1 << 32) + 5000),  # start
        st.integers(0, 9000),  # count
        st.integers(1 << 20, (1 << 20) + 64),  # source
        st.integers(1 << 30, (1 << 30) + 64) | st.just(0),  # target
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=parts_, chunk=st.integers(1, 5))
def test_chunks_cover_every_word_once_and_nothing_else(
    drawn: list[tuple[int, tuple[int, bool], int, int, int, int]], chunk: int
) -> None:
    drawn.sort(key=lambda part: part[0])
    n = len(drawn)
    bucket, kinds, start, count, source, target = zip(*drawn, strict=True) if drawn else ((), (), (), (), (), ())
    parts = Parts(
        column(bucket), np.arange(n), column([w for w, _ in kinds]), column(start), column(count), column(source),
        column(target), np.array([narrow for _, narrow in kinds], np.bool_),
    )  # fmt: skip
    cut = table(parts, parts.target != 0, np.zeros(n, np.int64), chunk)
    runs = [(low, high) for launches in cut.launches.values() for low, high, _ in launches]
    assert sorted(i for low, high in runs for i in range(low, high)) == list(range(cut.owners.size))
    covered: dict[int, list[tuple[int, int]]] = {row: [] for row in range(n)}
    for number, launches in cut.launches.items():
        for low, high, kind in launches:
            for i in range(low, high):
                # What the kernel does with a chunk.
                entry = cut.entries[cut.owners[i]].tolist()
                assert cut.entries_of[number][0] <= cut.owners[i] < cut.entries_of[number][1]
                ahead = (i - entry[CHUNK0]) * chunk
                begin = entry[BEGIN] if ahead == 0 else 0
                end = min(entry[END] - ahead * BLOCK, chunk * BLOCK)
                row = entry[ROW]
                width, read = min(kinds[row][0], 2), 4 if kinds[row][1] else min(kinds[row][0], 2)
                assert bucket[row] == number
                assert bool(kind & WIDE) is (width == 2)
                assert bool(kind & NARROW) is kinds[row][1]
                assert 0 <= begin < end <= chunk * BLOCK
                assert begin < BLOCK
                word = (entry[FIRST] + ahead) * BLOCK + begin
                # The address of the chunk's first word is the part's, so many words on.
                skipped = word - start[row] * (kinds[row][0] // width)
                assert entry[SOURCE] + (ahead * BLOCK + begin) * read == source[row] + skipped * read
                if target[row]:
                    assert entry[TARGET] + (ahead * BLOCK + begin) * width == target[row] + skipped * width
                else:
                    assert entry[TARGET] == 0
                if kind & ALIGNED:
                    assert entry[SOURCE] % 16 == entry[TARGET] % 16 == 0
                covered[row].append((word, end - begin))
    for row, pieces in covered.items():
        at = start[row] * (kinds[row][0] // min(kinds[row][0], 2))
        for word, words in sorted(pieces):
            assert word == at
            at += words
        assert at == (start[row] + count[row]) * (kinds[row][0] // min(kinds[row][0], 2))


@pytest.mark.parametrize("most", [1, 5000, 20_000, 1 << 40])
def test_a_bucket_in_pieces_is_the_same_bucket_and_no_piece_is_much_larger_than_asked_for(
    kernel: str, most: int
) -> None:
    sizes = [40_000, 6, 0, 1, 9000, 12_346]
    sources = [content(nbytes, 2 * (n % 2), n) for n, nbytes in enumerate(sizes)]
    targets = [torch.zeros_like(source) for source in sources]
    n, width = len(sources), [2, 2, 2, 1, 1, 2]
    parts = Parts(
        np.zeros(n, np.int64), np.arange(n), column(width), np.zeros(n, np.int64),
        column([source.nbytes // w for source, w in zip(sources, width, strict=True)]),
        column([source.data_ptr() for source in sources]), column([target.data_ptr() for target in targets]),
        np.full(n, False),
    )  # fmt: skip
    work = CudaWork(CPU, n, parts, "source", chunk=2)
    seen, copied = [], []
    for nbytes in work.pieces(0, np.zeros(n, np.int64), most):
        seen.append(nbytes)
        copied.append(sum(int(target.count_nonzero()) for target in targets))
    assert [int(d) for d in work.digests()] == [reference(raw(s), w) for s, w in zip(sources, width, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))
    assert copied[0] == 0, "a piece is asked for before it goes, not after"
    assert copied == sorted(copied)
    if kernel == "torch":
        assert seen == [sum(sizes)]
    else:
        # A chunk is the least that there is: 2 blocks of 1024 words here.
        assert abs(sum(seen) - sum(sizes)) <= len(seen)
        assert max(seen) <= max(most, 4096), "and one at least"
        assert (len(seen) == 21) is (most <= 5000)
