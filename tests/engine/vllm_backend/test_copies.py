"""Batched copies: a table of addresses, what may stand in it, and what runs over it.

The kernel itself runs here in Triton's interpreter, where Triton is installed and TRITON_INTERPRET=1; on a GPU it is
tried out before it is used, and `tests/gpu/plan_h200.py` compares what it makes.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pitstop.engine.vllm_backend import copies
from pitstop.engine.vllm_backend.copies import CHUNK, WORD, Copies, pair, prepare, table
from pitstop.engine.vllm_backend.loader_trace import View

CPU = torch.device("cpu")
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def by_hand(entries: torch.Tensor, owners: torch.Tensor, chunks: int) -> None:
    """What the kernel does, program by program."""
    for number in range(chunks):
        source, target, words, first = entries[owners[number]].tolist()
        ahead = (number - first) * CHUNK
        assert 0 <= ahead < words
        skip, nbytes = ahead * WORD, min(words - ahead, CHUNK) * WORD
        ctypes.memmove(target + skip, source + skip, nbytes)


def by_kernel(entries: torch.Tensor, owners: torch.Tensor, chunks: int) -> None:
    from pitstop.engine.vllm_backend.copies_triton import launch

    launch(entries, owners, chunks)


def upload(entries: Any, owners: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(entries), torch.from_numpy(owners)


@pytest.fixture(
    params=[by_hand, pytest.param(by_kernel, marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter"))]
)
def tabled(request: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have copies go by the table; return how many chunks each launch had."""
    launched: list[int] = []

    def launch(entries: torch.Tensor, owners: torch.Tensor, chunks: int) -> None:
        launched.append(chunks)
        request.param(entries, owners, chunks)

    monkeypatch.setattr(copies, "prepare", lambda _: (launch, upload))
    return launched


@given(st.lists(st.integers(1, 5 * CHUNK), min_size=1, max_size=20))
def test_every_word_of_every_copy_is_in_one_chunk(words: list[int]) -> None:
    entries, owners = table([1 << 40] * len(words), [1 << 41] * len(words), [n * WORD for n in words])
    assert entries[:, 2].tolist() == words
    for n, count in enumerate(words):
        mine = np.flatnonzero(owners == n)
        assert mine.tolist() == list(range(entries[n, 3], entries[n, 3] + len(mine)))
        assert (len(mine) - 1) * CHUNK < count <= len(mine) * CHUNK


def all_of(tensor: torch.Tensor) -> View:
    return View(0, tuple(tensor.shape), tuple(tensor.stride()))


def test_everything_arrives_by_one_launch_or_by_torch(tabled: list[int]) -> None:
    torch.manual_seed(0)
    big = torch.zeros(3, CHUNK * 4 + 8, dtype=torch.bfloat16)
    wide, rows = torch.zeros(64, 64), torch.zeros(4, 64)
    whole = [
        (big[1], torch.randn(big.shape[1]).bfloat16()),  # several chunks, the last not a whole one
        (torch.zeros(8, dtype=torch.bfloat16), torch.randn(8).bfloat16()),  # one grain
        (torch.zeros(3), torch.randn(3)),  # twelve bytes: no multiple of a grain
        (wide[:, :32], torch.randn(64, 32)),  # does not lie in one piece
        (torch.zeros(64), torch.randn(64).double()),  # changes its dtype
        (torch.zeros(65)[1:], torch.randn(64)),  # lies badly
        (torch.zeros(4, 4), torch.randn(4)),  # is broadcast
        (torch.zeros(0), torch.zeros(0)),
    ]
    work = [(source, [pair(target, all_of(source))]) for target, source in whole]
    split, columns = torch.randn(4, 64), torch.randn(4, 8)
    # Parts of one tensor: rows that lie in one piece, and columns, which do not.
    work.append((split, [pair(rows[n], View(64 * (3 - n), (64,), (1,))) for n in range(4)]))
    left = torch.zeros(4, 4)
    work.append((columns, [pair(left, View(4, (4, 4), (8, 1)))]))
    Copies(work, CPU).run()
    for target, source in whole:
        assert torch.equal(target, source.to(target.dtype).expand(target.shape))
    assert torch.equal(rows, split.flip(0))
    assert torch.equal(left, columns[:, 4:])
    assert not wide[:, 32:].any()
    assert not big[0].any()
    assert not big[2].any()
    assert tabled == [2 + 1 + 4]


def test_copies_can_be_run_again_for_what_the_sources_hold_then(tabled: list[int]) -> None:
    target, source, nothing = torch.zeros(64), torch.ones(64), torch.zeros(0)
    made = Copies([(source, [pair(target, all_of(source))]), (nothing, [pair(nothing, all_of(nothing))])], CPU)
    for value in (1.0, 2.0):
        source.fill_(value)
        made.run()
        assert target.eq(value).all()
    assert tabled == [1, 1]


def test_where_there_is_nothing_to_copy_nothing_is_launched(tabled: list[int]) -> None:
    nothing = torch.zeros(0)
    Copies([(nothing, [pair(nothing, all_of(nothing))])], CPU).run()
    Copies([(torch.ones(4), [])], CPU).run()
    Copies([], CPU).run()
    assert tabled == []


def test_what_lies_on_another_device_goes_by_torch(tabled: list[int]) -> None:
    place, elsewhere = torch.zeros(64), torch.zeros(64, device="meta")
    made = Copies([(elsewhere, [pair(place, all_of(elsewhere))])], CPU)
    with pytest.raises(NotImplementedError, match="meta"):
        made.run()
    assert tabled == []


def test_what_would_be_read_past_a_tensors_end_does_not_go_by_the_table(tabled: list[int]) -> None:
    place, short = torch.zeros(64), torch.ones(32)
    with pytest.raises(RuntimeError, match="out of bounds"):
        Copies([(short, [pair(place, View(0, (64,), (1,)))])], CPU)
    assert tabled == []


def test_without_memory_for_a_table_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_entries: Any, _owners: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(copies, "prepare", lambda _: (by_hand, full))
    places, source = torch.zeros(2, 64), torch.randn(64)
    odd = torch.zeros(3)
    made = Copies(
        [(source, [pair(place, all_of(source)) for place in places]), (odd + 1, [pair(odd, all_of(odd))])], CPU
    )
    made.run()
    assert torch.equal(places[0], source)
    assert torch.equal(places[1], source)
    assert odd.eq(1).all()


def test_without_a_gpu_torch_copies() -> None:
    assert prepare(CPU) is None
    target, source = torch.zeros(64), torch.ones(64)
    Copies([(source, [pair(target, all_of(source))])], CPU).run()
    assert target.eq(1).all()


def test_a_kernel_that_copies_wrongly_is_not_used() -> None:
    def short(entries: torch.Tensor, owners: torch.Tensor, chunks: int) -> None:
        by_hand(entries, owners, chunks - 1)

    copies._try_out(by_hand, upload, CPU)
    with pytest.raises(ArithmeticError, match="a copy is wrong"):
        copies._try_out(short, upload, CPU)
