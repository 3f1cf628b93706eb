"""Rows that are parts of what is offered: rows without padding, experts of a fused tensor. Nothing else travels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pitstop.engine.errors import ProtocolViolation
from pitstop.engine.refit import route
from pitstop.engine.worker_ports import Inventory, Manifest, Offer, TensorSpec, Ticket
from pitstop.transports import checkpoint_source, digest, tensor_source
from pitstop.transports.buckets import place
from pitstop.transports.cuda_ring import Drainer, Pourer
from pitstop.transports.digest import reference
from pitstop.transports.merging import MergedSource
from pitstop.transports.packing import Slot, Source, checked, slots_of
from pitstop.transports.pouring import Geometry, pour
from pitstop.transports.reports import accept, accepted
from pitstop.transports.segment import Mapping, Segment
from pitstop.transports.sources import TensorSource, source_of
from tests.transports.test_cuda_ring import SLOT, SLOTS, Memory, travel
from tests.transports.test_sources import raw

EMBED, NORM, EXPERTS = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.experts"
ROWS, PADDED, E, INNER, HIDDEN = 300, 320, 3, 40, 56


def padded() -> dict[str, torch.Tensor]:
    """What a trainer holds: a padded vocabulary, with rows that nobody may see, and fused experts."""
    embed = torch.randn(PADDED, HIDDEN)
    embed[ROWS:] = 1e30
    return {
        f"{EXPERTS}.down_proj": torch.randn(E, HIDDEN, INNER),
        EMBED: embed,
        NORM: torch.randn(HIDDEN),
        f"{EXPERTS}.gate_up_proj": torch.randn(E, 2 * INNER, HIDDEN),
    }


def expected(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a checkpoint of the same weights has."""
    found = {EMBED: tensors[EMBED][:ROWS], NORM: tensors[NORM]}
    for n in range(E):
        gate, up = tensors[f"{EXPERTS}.gate_up_proj"][n].split(INNER)
        found |= {f"{EXPERTS}.{n}.gate_proj.weight": gate, f"{EXPERTS}.{n}.up_proj.weight": up}
        found[f"{EXPERTS}.{n}.down_proj.weight"] = tensors[f"{EXPERTS}.down_proj"][n]
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def routed(source: Source, wanted: dict[str, torch.Tensor]) -> Manifest:
    specs = tuple(TensorSpec(k, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for k, t in wanted.items())
    offer = Offer("r", 1, source.specs(), "inventory", vocabulary="trim")
    return route(offer, Inventory(specs, {}, (EMBED,)))


def mapped(nbytes: int) -> Mapping:
    segment = Segment(nbytes)
    mapping = Mapping(segment.path, segment.nbytes, "write")
    segment.close()
    mapping.bytes[:] = 0xA5
    return mapping


def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, stored the other way round."""
    return {name: t.transpose(0, -1).contiguous().transpose(0, -1) for name, t in tensors.items()}


Make = Callable[[dict[str, torch.Tensor], Path], Source]


def of_tensors(tensors: dict[str, torch.Tensor], _: Path) -> Source:
    return TensorSource(tensors.items())


def of_turned(tensors: dict[str, torch.Tensor], _: Path) -> Source:
    return TensorSource(turned(tensors).items())


def of_merged(tensors: dict[str, torch.Tensor], _: Path) -> Source:
    """With an adapter of the embedding that adds nothing: what arrives went through a merge."""
    from pitstop.transports.adapters import Adapted, Delta, Part

    delta = Delta(torch.zeros(PADDED, 2), torch.randn(2, HIDDEN), 1.0)
    parts = (Part(name, tensor, delta if name == EMBED else None) for name, tensor in tensors.items())
    source = source_of(Adapted(tuple(parts)))
    assert isinstance(source, MergedSource)
    return source


def of_checkpoint(tensors: dict[str, torch.Tensor], folder: Path) -> Source:
    save_file(tensors, folder / "model.safetensors")
    return source_of(folder)


@pytest.mark.parametrize("make", [of_tensors, of_turned, of_merged, of_checkpoint])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slot_nbytes", [0, 1024, 1 << 20], ids=["whole", "many buckets", "one bucket"])
def test_parts_arrive_bit_for_bit_with_digests_of_their_own(
    make: Make, wire: torch.dtype, slot_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (digest, tensor_source, checkpoint_source):
        monkeypatch.setattr(module, "CALL_BYTES", 4096)
    tensors = padded()
    source, wanted = make(tensors, tmp_path), expected(tensors, wire)
    manifest = routed(source, wanted)
    placed, nbytes = place([row.spec for row in manifest.rows])
    target, found = mapped(nbytes), np.full(len(placed), 7, np.uint64)
    if slot_nbytes:
        ring, digests, filled = mapped(2 * slot_nbytes), list[int](), list[int]()
        geometry = Geometry(source.specs(), slots_of(manifest, [0] * len(placed)), 2, slot_nbytes)

        def drain(count: int) -> None:
            for part in geometry.buckets[count - 1]:
                width = torch.empty((), dtype=wire).element_size()
                here, there = geometry.slot(count - 1) + part.offset, placed[part.row].offset + part.start * width
                target.bytes[there : there + part.count * width] = ring.bytes[here : here + part.count * width]
            filled.append(count)

        for _ in pour(source, geometry, ring, lambda: len(filled), drain, digests):
            pass
        found[:] = digests
    else:
        slots = slots_of(manifest, [at.offset for at in placed])
        checked(source.specs(), slots, nbytes)
        for _ in source.pack(slots, target, found):
            pass
    source.close()
    assert {at.spec.name for at in placed} == wanted.keys()
    for at, value in zip(placed, found.tolist(), strict=True):
        name = at.spec.name
        arrived = target.tensor(at.spec.dtype, at.spec.shape, at.offset)
        assert raw(arrived) == raw(wanted[name]), name
        assert value == reference(raw(wanted[name]), wanted[name].element_size()), name


@pytest.mark.parametrize("change", [dict, turned])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_parts_go_through_a_ring_on_a_gpu_the_same_way(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], wire: torch.dtype
) -> None:
    tensors = padded()
    source, wanted = TensorSource(change(tensors).items()), expected(tensors, wire)
    manifest = routed(source, wanted)
    specs = [row.spec for row in manifest.rows]
    geometry = Geometry(source.specs(), slots_of(manifest, [0] * len(specs)), SLOTS, SLOT)
    ring = Memory()
    pourer = Pourer(source.lendable(geometry.rows)[0], geometry.specs, ring, SLOTS, SLOT)
    drainer = Drainer(ring, specs, SLOTS, SLOT)
    rows = [row for whole in travel(pourer, drainer) for row in whole]
    assert sorted(rows) == list(range(len(specs)))
    for (spec, tensor), sent, got in zip(
        drainer.tensors(range(len(specs))), pourer.digests().tolist(), drainer.digests().tolist(), strict=True
    ):
        assert raw(tensor) == raw(wanted[spec.name]), spec.name
        assert sent == got == reference(raw(wanted[spec.name]), tensor.element_size())


def test_which_part_a_row_is_survives_the_wire_and_whole_ones_cost_nothing() -> None:
    source = TensorSource(padded().items())
    manifest = routed(source, expected(padded(), torch.float32))
    placed, nbytes = place([row.spec for row in manifest.rows])
    ticket = Ticket("r", "replica-0", 1, 0, "x:Y", "", nbytes, placed, "", "", 1.0, 5.0)
    assert accepted(accept(manifest, ticket)) == slots_of(manifest, [p.offset for p in placed])
    whole = Manifest(tuple(row for row in manifest.rows if row.start is None))
    placed, nbytes = place([row.spec for row in whole.rows])
    message = accept(whole, Ticket("r", "replica-0", 1, 0, "x:Y", "", nbytes, placed, "", "", 1.0, 5.0))
    assert (message.starts, message.counts) == (b"", b"")
    assert accepted(message) == slots_of(whole, [p.offset for p in placed])


@pytest.mark.parametrize("slot", [Slot(0, "float32", 0, 0, 5, 4), Slot(0, "float32", 0, 0, 9, 0)])
def test_an_engine_that_asks_for_more_than_a_tensor_has_is_refused(slot: Slot) -> None:
    specs = (TensorSpec("a", "float32", (8,)),)
    with pytest.raises(ProtocolViolation, match="more of a than it has"):
        checked(specs, [slot], 1 << 20)
    with pytest.raises(ProtocolViolation, match="more of a than it has"):
        Geometry(specs, [slot], 2, 1024)
    checked(specs, [Slot(0, "float32", 0, 0, 4, 4)], 16)
