"""Both ends of a GPU's ring, over the host's memory: what is copied, cast, counted and proven is the same there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pitstop.engine.errors import DeadlineExceeded, LocalError
from pitstop.engine.worker_ports import ITEMSIZE, TensorSpec
from pitstop.transports import cuda_ring
from pitstop.transports.cuda_ring import Drainer, Pourer
from pitstop.transports.digest import reference

CPU = torch.device("cpu")
SLOTS, SLOT = 3, 4096


@dataclass
class Memory:
    nbytes: int = SLOTS * SLOT
    device: torch.device = CPU
    content: Tensor = field(default_factory=lambda: torch.zeros(SLOTS * SLOT + 512, dtype=torch.uint8))

    @property
    def address(self) -> int:
        return -(-self.content.data_ptr() // 512) * 512


def version(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "large": torch.randn(120, 61).bfloat16(),
        "bias": torch.randn(7),
        "none": torch.zeros(0, 4, dtype=torch.bfloat16),
        "scale": torch.tensor(3.5 + seed),
        "ids": torch.arange(600) - seed,
        "bytes": torch.randint(0, 256, (5001,)).to(torch.uint8),
        "mask": torch.randn(33) > 0,
        "fp8": torch.randn(64, 3).to(torch.float8_e4m3fn),
        "turned": torch.randn(64, 50).bfloat16().t(),
        "masters": torch.randn(3000),
        "turned masters": torch.randn(40, 30).t(),
        "halves": torch.randn(900),
        "last": torch.randn(3, 5, 7, dtype=torch.float64),
    }


WIRE = {"masters": "bfloat16", "turned masters": "bfloat16", "halves": "float16"}


def specs(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, WIRE.get(n, str(t.dtype).removeprefix("torch.")), tuple(t.shape)) for n, t in tensors.items()]


def wanted(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [t.to(getattr(torch, s.dtype)).contiguous() for t, s in zip(tensors.values(), specs(tensors), strict=True)]


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def proofs(tensors: dict[str, Tensor]) -> list[int]:
    pairs = zip(wanted(tensors), specs(tensors), strict=True)
    return [reference(raw(t), ITEMSIZE[spec.dtype]) for t, spec in pairs]


def pourer(ring: Memory, tensors: dict[str, Tensor]) -> Pourer:
    return Pourer(list(tensors.values()), specs(tensors), ring, SLOTS, SLOT)


def travel(pouring: Pourer, draining: Drainer, at_once: int = 1) -> Iterator[list[int]]:
    """Move everything through the ring, as two processes would."""
    assert pouring.buckets == draining.buckets
    numbers = list(range(pouring.buckets))
    for low in range(0, len(numbers), at_once):
        for number in numbers[low : low + at_once]:
            assert pouring.wait(pouring.pour(number), 1.0)
        yield draining.drain(*numbers[low : low + at_once])


@pytest.mark.parametrize("at_once", [1, SLOTS])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_poured_is_drained_and_proven(in_place: bool, at_once: int) -> None:
    ring, buffer = Memory(), None
    for seed in range(2):
        tensors = version(seed)
        pouring = pourer(ring, tensors)
        draining = Drainer(ring, specs(tensors), SLOTS, SLOT, live={} if in_place else None, buffer=buffer)
        buffer = draining.buffer
        found: dict[str, Tensor] = {}
        for rows in travel(pouring, draining, at_once):
            now = draining.tensors(rows)
            assert not found.keys() & {spec.name for spec, _ in now}
            found |= {spec.name: tensor for spec, tensor in now}
        assert pouring.buckets > SLOTS
        for name, tensor in zip(tensors, wanted(tensors), strict=True):
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert raw(found[name]) == raw(tensor), name
        assert pouring.digests().tolist() == draining.digests().tolist() == proofs(tensors)


def test_in_place_every_tensor_has_memory_of_its_own_and_the_drainer_lets_go_of_it() -> None:
    ring, tensors = Memory(), version(0)
    draining = Drainer(ring, specs(tensors), SLOTS, SLOT, live={})
    kept = [t for rows in travel(pourer(ring, tensors), draining) for _, t in draining.tensors(rows)]
    assert draining.buffer is None
    assert len({t.untyped_storage().data_ptr() for t in kept if t.numel()}) == sum(t.numel() > 0 for t in kept)
    assert draining._fresh == {}


def test_in_place_what_has_a_place_is_written_there_and_what_lies_around_it_stays() -> None:
    ring, tensors = Memory(), version(1)
    home, live, end = torch.full((1 << 18,), 0xA5, dtype=torch.uint8), dict[str, Tensor](), 0
    for number, (spec, tensor) in enumerate(zip(specs(tensors), wanted(tensors), strict=True)):
        if number % 3:
            # As slices of larger parameters: now at a multiple of 16, now only at one of their own width.
            begin = -(-(end + 40) // 16) * 16 + number % 2 * tensor.itemsize
            end = begin + spec.nbytes
            live[spec.name] = home[begin:end].view(tensor.dtype).view(tensor.shape)
    draining = Drainer(ring, specs(tensors), SLOTS, SLOT, live=live)
    pouring = pourer(ring, tensors)
    found = {spec.name: t for rows in travel(pouring, draining, SLOTS) for spec, t in draining.tensors(rows)}
    assert pouring.digests().tolist() == draining.digests().tolist() == proofs(tensors)
    for name, tensor in zip(tensors, wanted(tensors), strict=True):
        assert raw(found[name]) == raw(tensor), name
        assert name not in live or found[name].data_ptr() == live[name].data_ptr()
    outside = torch.ones_like(home, dtype=torch.bool)
    for place in live.values():
        low = place.data_ptr() - home.data_ptr()
        outside[low : low + place.nbytes] = False
    assert bool((home[outside] == 0xA5).all())


def test_staged_rows_may_be_asked_for_at_the_end_and_keep_the_buffer() -> None:
    ring, tensors = Memory(), version(0)
    draining = Drainer(ring, specs(tensors), SLOTS, SLOT)
    assert sorted(row for rows in travel(pourer(ring, tensors), draining) for row in rows) == list(range(len(tensors)))
    found = draining.tensors(range(len(tensors)))
    assert draining.buffer is not None
    home = draining.buffer.untyped_storage().data_ptr()
    del draining
    for (_, tensor), expected in zip(found, wanted(tensors), strict=True):
        assert tensor.untyped_storage().data_ptr() == home
        assert raw(tensor) == raw(expected)


def test_copies_made_on_the_way_are_made_once_and_dropped() -> None:
    ring, tensors = Memory(), version(0)
    pouring = pourer(ring, tensors)
    held = set()
    for bucket in range(pouring.buckets):
        pouring.pour(bucket)
        held |= {name for row, name in enumerate(tensors) if row in pouring._made}
    assert held <= {"turned", "turned masters", "halves"}
    assert pouring._made == {}


def test_damage_in_the_ring_shows_in_the_digests() -> None:
    ring, tensors = Memory(), version(0)
    pouring, draining = pourer(ring, tensors), Drainer(ring, specs(tensors), SLOTS, SLOT)
    pouring.pour(0)
    begin = ring.address - ring.content.data_ptr()
    ring.content[begin + 100] ^= 4
    draining.drain(0)
    for number in range(1, pouring.buckets):
        pouring.pour(number)
        draining.drain(number)
    differ = draining.digests() != pouring.digests()
    assert differ.tolist() == [True] + [False] * (len(tensors) - 1)


def test_what_does_not_fit_is_named() -> None:
    ring, tensors = Memory(), version(0)
    with pytest.raises(LocalError, match="do not fit into a ring"):
        Pourer(list(tensors.values()), specs(tensors), ring, SLOTS + 1, SLOT)
    with pytest.raises(LocalError, match="do not fit into a ring"):
        Drainer(ring, specs(tensors), SLOTS + 1, SLOT)
    with pytest.raises(LocalError, match=r"bias is \(8,\) on cpu, not \(7,\)"):
        Pourer([torch.zeros(8)], [TensorSpec("bias", "float32", (7,))], ring, SLOTS, SLOT)
    with pytest.raises(LocalError, match="the buffer has 64 bytes"):
        Drainer(ring, specs(tensors), SLOTS, SLOT, buffer=torch.zeros(64, dtype=torch.uint8))


def test_a_gpu_that_does_not_come_to_it_is_a_typed_error_and_its_memory_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        passed = False

        def query(self) -> bool:
            return self.passed

    late = Late()
    monkeypatch.setattr(cuda_ring.Side, "fence", lambda _: late)
    ring, tensors = Memory(), version(0)
    pouring, draining = pourer(ring, tensors), Drainer(ring, specs(tensors), SLOTS, SLOT)
    fence = pouring.pour(0)
    assert not pouring.done(fence)
    assert not pouring.wait(fence, 0.01)
    with pytest.raises(DeadlineExceeded):
        draining.drain(0, seconds=0.01)
    assert cuda_ring._stuck == [(late, draining)]
    late.passed = True
    Drainer(ring, specs(tensors), SLOTS, SLOT)
    assert cuda_ring._stuck == []
