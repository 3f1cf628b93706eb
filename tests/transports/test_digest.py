"""The digest: one definition, the same everywhere, blind to nothing that happens to weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pitstop.transports import digest, digest_kernels, digest_plain
from pitstop.transports.digest import CHECK, COPY, NARROW, Work, lanes, odd_words, reference

WIDTHS = (1, 2, 4, 8)
content = st.binary(min_size=0, max_size=6000)


def elements(data: bytes, width: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(data[: len(data) // width * width], f"u{width}").copy()


def digests(kind: int, width: int, *parts: np.ndarray[Any, Any], start: int = 0) -> list[int]:
    target = [np.zeros_like(part) for part in parts]
    work = Work(
        kind,
        np.full(len(parts), width),
        np.array([part.ctypes.data for part in parts], np.uint64),
        np.array([part.ctypes.data for part in target], np.uint64),
        np.array([part.size for part in parts]),
        np.full(len(parts), start),
    )
    assert sum(work) == sum(part.nbytes for part in parts)
    if kind == COPY:
        assert all(np.array_equal(a, b) for a, b in zip(parts, target, strict=True))
    return [int(value) for value in work.digests]


@pytest.fixture(params=["compiled", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    run: Callable[..., Any] = digest_kernels.run if request.param == "compiled" else digest_plain.run
    future: Future[Any] = Future()
    future.set_result(run)
    monkeypatch.setattr(digest, "_kernels", [future])
    return run


def test_the_definition_is_this_one() -> None:
    """Written out once more, element by element: it may never change without a new protocol version."""

    def odd(n: int) -> int:
        z = n * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return (z ^ (z >> 31)) | 1

    words = [(i * 40503 + 7) % 65536 for i in range(2500)]
    expected = sum(w * odd(1025 + i // 1024) * odd(1 + i % 1024) + 0x9E3779B97F4A7C15 for i, w in enumerate(words))
    raw = np.array(words, "<u2").tobytes()
    assert expected % 2**64 == reference(raw, 2) == reference(raw, 4) == reference(raw, 8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [COPY, CHECK])
def test_kernels_agree_with_the_reference(kernel: object, kind: int, width: int) -> None:
    rng = np.random.default_rng(width)
    parts = [elements(rng.bytes(n * width), width) for n in (0, 1, 3, 511, 1024, 1025, 5000)]
    for start in (0, 1, 1023, 123_456_789_012):
        expected = [reference(part.tobytes(), width, start) for part in parts]
        assert digests(kind, width, *parts, start=start) == expected


@settings(max_examples=60, deadline=None)
@given(data=content, width=st.sampled_from(WIDTHS), cuts=st.lists(st.integers(0, 6000), max_size=4))
def test_digests_of_shards_add_up(data: bytes, width: int, cuts: list[int]) -> None:
    whole = elements(data, width)
    edges = sorted({0, whole.size, *(cut % (whole.size + 1) for cut in cuts)})
    shards = [digests(CHECK, width, whole[low:high].copy(), start=low)[0] for low, high in pairwise(edges)]
    assert sum(shards) % 2**64 == reference(whole.tobytes(), width)


@pytest.mark.parametrize("call_bytes", [64, 4096, 32 << 20])
def test_cutting_the_work_changes_nothing(monkeypatch: pytest.MonkeyPatch, call_bytes: int) -> None:
    monkeypatch.setattr(digest, "CALL_BYTES", call_bytes)
    rng = np.random.default_rng(0)
    parts = [elements(rng.bytes(n * 4), 4) for n in (1, 15, 16, 17, 2000)]
    assert digests(COPY, 4, *parts) == [reference(part.tobytes(), 4) for part in parts]


@settings(max_examples=80, deadline=None)
@given(data=st.binary(min_size=8, max_size=4000), width=st.sampled_from(WIDTHS), pick=st.data())
def test_one_or_two_flipped_bits_never_go_unnoticed(data: bytes, width: int, pick: st.DataObject) -> None:
    whole = elements(data, width)
    damaged = whole.copy()
    raw = damaged.view(np.uint8)
    first = pick.draw(st.integers(0, raw.size * 8 - 1))
    second = pick.draw(st.integers(0, raw.size * 8 - 1))
    for bit in {first, second}:
        raw[bit // 8] ^= np.uint8(1 << (bit % 8))
    assert digests(CHECK, width, damaged) != digests(CHECK, width, whole)


def test_any_two_changes_of_a_bit_and_any_swap_within_a_block_are_noticed_by_construction() -> None:
    # Two changes of 2**a and 2**b cancel only if a == b and the keys agree, or are opposite, in their low 64 - a bits.
    low = [int(key) % 2**49 for key in lanes()]
    assert len({*low, *((-key) % 2**49 for key in low)}) == 2 * len(low)
    assert all(key % 2 for key in low)
    assert len(set(odd_words(1025, 10_000).tolist())) == 10_000


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=16, max_size=4000),
    width=st.sampled_from(WIDTHS),
    places=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)),
)
def test_swapped_elements_are_noticed(data: bytes, width: int, places: tuple[int, int]) -> None:
    whole = elements(data, width)
    i, j = (place % whole.size for place in places)
    swapped = whole.copy()
    swapped[[i, j]] = swapped[[j, i]]
    same = bool(whole[i] == whole[j])
    assert (digests(CHECK, width, swapped) == digests(CHECK, width, whole)) is same


@pytest.mark.parametrize("width", WIDTHS)
def test_moved_missing_and_stale_parts_are_noticed(width: int) -> None:
    rows, length = 64, 700
    whole = elements(np.random.default_rng(3).bytes(rows * length * width), width).reshape(rows, length)
    damages = {
        "rows swapped": whole[[1, 0, *range(2, rows)]],
        "rows swapped to and fro": np.concatenate([whole[[1, 0]], whole[2:-2], whole[[-1, -2]]]),
        "all rows backwards": whole[::-1],
        "shifted by one": np.roll(whole, 1),
        "transposed blocks": whole.reshape(2, 32, length).transpose(1, 0, 2).reshape(rows, length),
        "tail at zero": np.concatenate([whole[:-1], np.zeros((1, length), whole.dtype)]),
        "tail of the version before": np.concatenate([whole[:-1], whole[:1]]),
        "tail missing": whole[:-1],
        "signs turned": whole ^ whole.dtype.type(1 << (8 * width - 1)),
        "all off by one": whole + whole.dtype.type(1),
    }
    expected = digests(CHECK, width, whole.reshape(-1))
    for name, damaged in damages.items():
        assert digests(CHECK, width, np.ascontiguousarray(damaged).reshape(-1)) != expected, name


def test_zeros_count() -> None:
    assert reference(b"", 2) == 0
    assert len({reference(bytes(2 * n), 2) for n in range(50)}) == 50


def test_the_cast_is_torchs_and_its_digest_that_of_the_result(kernel: object) -> None:
    special = [
        0.0,
        -0.0,
        1.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        3.3895e38,
        -3.4028e38,
        1e-45,
        1.00390625,
        1.01171875,
    ]
    bits = np.random.default_rng(1).integers(0, 1 << 32, 40_000, np.uint32)
    wide = np.concatenate([np.array(special, np.float32).view(np.uint32), bits, np.array([0x7F800001], np.uint32)])
    narrow = np.zeros(wide.size, np.uint16)
    work = Work(
        NARROW, np.array([4]), np.array([wide.ctypes.data], np.uint64), np.array([narrow.ctypes.data], np.uint64),
        np.array([wide.size]),
    )  # fmt: skip
    assert sum(work) == wide.nbytes
    expected = torch.from_numpy(wide.view(np.float32)).to(torch.bfloat16)
    found = torch.from_numpy(narrow).view(torch.bfloat16)
    nan = expected.isnan()
    assert torch.equal(nan, found.isnan())
    assert torch.equal(expected.view(torch.int16)[~nan], found.view(torch.int16)[~nan])
    assert int(work.digests[0]) == reference(narrow.tobytes(), 2)


def test_without_a_cache_folder_kernels_compile_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def njit(*signature: str, **options: object) -> Callable[[object], object]:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(digest_kernels, "njit", njit)
    compiled: object = digest_kernels._compiled(len)
    assert compiled is len
    assert [options.get("cache") for options in asked] == [True, None]


def test_importing_transports_loads_neither_torch_nor_numba_nor_numpy() -> None:
    code = "import sys, pitstop.transports; print([m for m in ('torch', 'numba', 'numpy') if m in sys.modules])"
    child = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (child.stdout.strip(), child.stderr) == ("[]", "")
