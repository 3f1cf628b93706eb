"""Readings of a model's memory, without an engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pitstop.engine.errors import DeadlineExceeded, ReadingCutShort
from pitstop.engine.vllm_backend import fingerprint as module
from pitstop.engine.vllm_backend.fingerprint import Reading, fingerprint, readable
from pitstop.engine.worker_ports import WorkerReply

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, numel: int = 1000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel), requires_grad=False)
        self.odd = nn.Parameter(torch.arange(13, dtype=torch.int8), requires_grad=False)
        self.register_buffer("table", torch.randn(7, 6).t())
        self.register_buffer("none", torch.empty(0))


def test_every_bit_every_swap_and_every_shift_changes_a_tensors_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    model = Model()
    before = fingerprint(model)
    bits = model.weight.data.view(torch.int32)
    for place in (0, 1, 127, 128, 500, 999):
        for bit in (0, 15, 30, 31):
            flip = -(2**31) if bit == 31 else 1 << bit
            bits[place] ^= flip
            assert fingerprint(model)["weight"] != before["weight"]
            bits[place] ^= flip
    assert fingerprint(model) == before
    model.weight.data = model.weight.data.roll(2)
    assert fingerprint(model)["weight"] != before["weight"]
    for last in (12, 0):
        model.odd.data[last] ^= 1
        assert fingerprint(model)["odd"] != before["odd"]
        model.odd.data[last] ^= 1
    model.get_buffer("table")[3, 3] += 1
    assert fingerprint(model)["table"] != before["table"]


def test_chunks_do_not_change_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    whole = fingerprint(model)
    for size in (1, 3, 250):
        monkeypatch.setattr(module, "_CHUNK", size)
        assert fingerprint(model) == whole


def test_a_transposed_tensor_is_read_where_it_lies_and_one_with_gaps_too() -> None:
    dense = torch.randn(40, 30)
    model = nn.Module()
    model.register_buffer("turned", dense.t())
    model.register_buffer("gaps", torch.randn(40, 60)[:, 1:31])
    assert module._flat(model.get_buffer("turned")).data_ptr() == dense.data_ptr()
    before = fingerprint(model)
    dense[39, 29] += 1
    model.get_buffer("gaps")[39, 29] += 1
    after = fingerprint(model)
    assert [before[name] != after[name] for name in ("turned", "gaps")] == [True, True]


def test_what_changes_as_an_engine_serves_is_left_out_with_the_reason() -> None:
    model, layer, experts = nn.Module(), nn.Module(), nn.Module()
    model.add_module("attn", layer)
    model.add_module("moe", nn.Module())
    model.get_submodule("moe").add_module("experts", experts)
    experts.w13_weight = nn.Parameter(torch.ones(2), requires_grad=False)
    for name in ("_k_scale", "other"):
        layer.register_buffer(name, torch.tensor(1.0))
    named, seen = readable(model)
    assert (set(named), seen.left_out) == ({"attn._k_scale", "attn.other", "moe.experts.w13_weight"}, {})
    setattr(layer, "calculate_kv_scales", True)  # noqa: B010
    named, seen = readable(model, balanced=True)
    assert set(named) == {"attn.other"}
    assert seen.left_out == {
        "attn._k_scale": "computed from the first requests",
        "moe.experts.w13_weight": "moved between ranks by expert load balancing",
    }


def test_an_interrupted_reading_ends_in_the_middle_of_a_tensor_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 1)
    reading = Reading("r", Model(200_000), CPU)
    reading.interrupt()
    reading.ended(10.0)
    with pytest.raises(ReadingCutShort, match="rank 3"):
        reading.answer(WorkerReply(3))


def test_a_reading_equals_what_is_read_at_once() -> None:
    model = Model()
    reading = Reading("r", model, CPU)
    reading.ended(10.0)
    reply = reading.answer(WorkerReply(0))
    assert reply.fingerprint == fingerprint(model)
    assert (reply.error, reply.seen) == (None, readable(model)[1])


def test_who_waits_for_a_reading_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 1)
    reading = Reading("r", Model(2_000_000), CPU)
    with pytest.raises(DeadlineExceeded, match="still being read after 0 s"):
        reading.ended(0.0)
    reading.interrupt()
    reading.ended(10.0)
