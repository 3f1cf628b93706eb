"""Sources: whatever a trainer hands over arrives as the logical values it had, or is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pitstop.engine.errors import CheckpointUnreadable, InvalidRequest, OfferRejected
from pitstop.engine.worker_ports import TensorSpec
from pitstop.transports import checkpoint_source, digest, tensor_source
from pitstop.transports.buckets import place
from pitstop.transports.checkpoint_source import CheckpointSource
from pitstop.transports.digest import reference
from pitstop.transports.packing import Slot, Source
from pitstop.transports.segment import Mapping, Segment
from pitstop.transports.sources import TensorSource, source_of

BIG = 1 << 20


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def sent(source: Source, wire: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    """Pack everything into a segment and read it back, having checked every digest."""
    specs = [TensorSpec(s.name, (wire or {}).get(s.name, s.dtype), s.shape) for s in source.specs()]
    placed, nbytes = place(specs)
    segment = Segment(nbytes)
    write, read = Mapping(segment.path, segment.nbytes, "write"), Mapping(segment.path, segment.nbytes, "read")
    segment.close()
    # What a segment held before must not show through.
    write.bytes[:] = 0xA5
    digests = np.full(len(specs), 7, np.uint64)
    slots = [Slot(n, p.spec.dtype, p.offset) for n, p in enumerate(placed)]
    for _ in source.pack(slots, write, digests):
        pass
    found = {p.spec.name: read.tensor(p.spec.dtype, p.spec.shape, p.offset) for p in placed}
    for p, value in zip(placed, digests.tolist(), strict=True):
        assert value == reference(raw(found[p.spec.name]), found[p.spec.name].element_size()), p.spec.name
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


@pytest.fixture(params=["small calls", "large calls"])
def call_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size = BIG if request.param == "small calls" else digest.CALL_BYTES
    for module in (digest, tensor_source, checkpoint_source):
        monkeypatch.setattr(module, "CALL_BYTES", size)
    return size


# -- tensors -------------------------------------------------------------------------------------------------


def odd_layouts() -> dict[str, torch.Tensor]:
    base = torch.randn(48, 34)
    return {
        "plain": base.clone(),
        "every second": base[::2],
        "every third column": base[:, 1::3],
        "transposed": base.t(),
        "expanded": torch.randn(5, 1).expand(5, 7),
        "narrowed": base.narrow(1, 3, 9),
        "offset": base.view(-1)[17:],
        "flipped axes": torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "zero dimensions": torch.tensor(2.5),
        "strided zero dimensions": torch.arange(4.0)[2],
        "empty": torch.zeros(0),
        "empty rows": torch.zeros(0, 7),
        "empty columns of a view": base[:, 5:5],
        "negated view": torch.view_as_complex(torch.randn(9, 2)).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "needs a graph": torch.randn(4, requires_grad=True) * 2,
    }


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "float64"])
def test_any_layout_arrives_as_its_values(wire: str) -> None:
    tensors = odd_layouts()
    found = sent(TensorSource(tensors.items()), dict.fromkeys(tensors, wire))
    same(found, {name: t.detach().to(getattr(torch, wire)) for name, t in tensors.items()})


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_any_dtype_arrives_bit_for_bit(dtype: str) -> None:
    element: torch.dtype = getattr(torch, dtype)
    noise = torch.randint(0, 2 if dtype == "bool" else 256, (600 * element.itemsize,), dtype=torch.uint8)
    tensors = {"flat": noise.view(element), "turned": noise.view(element).view(20, 30).t()}
    same(sent(TensorSource(tensors.items())), tensors)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_float8_arrives_bit_for_bit(dtype: str) -> None:
    tensors = {"a": torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).view(16, 16)}
    same(sent(TensorSource(tensors.items())), tensors)


def test_a_float32_tensor_stays_one_unless_the_engine_asks_otherwise() -> None:
    bias = torch.linspace(6.82, 7.06, 256)
    tensors = {"weight": torch.randn(8, 8).to(torch.bfloat16), "bias": bias}
    found = sent(TensorSource(tensors.items()))
    same(found, tensors)
    assert len(found["bias"].unique()) == 256


@pytest.mark.parametrize("has", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float64", "float32", "float16", "bfloat16"])
def test_casts_are_torchs(has: str, wanted: str, call_bytes: int) -> None:
    tensor = torch.randn(1_100_000 if (has, wanted) == ("float32", "float16") else 5000) * 100
    tensor[:4] = torch.tensor([float("inf"), float("-inf"), 1e-41, -0.0])
    tensor = tensor.to(getattr(torch, has))
    same(sent(TensorSource([("a", tensor)]), {"a": wanted}), {"a": tensor.to(getattr(torch, wanted))})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_around_a_call_arrive_whole(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (digest, tensor_source):
        monkeypatch.setattr(module, "CALL_BYTES", BIG)
    element: torch.dtype = getattr(torch, dtype)
    sizes = [4096, BIG - element.itemsize, BIG, BIG + element.itemsize, 5 * BIG + element.itemsize]
    tensors = {f"{size}": torch.randn(size // element.itemsize).to(element) for size in sizes}
    tensors |= {f"turned {name}": t[: t.numel() // 2 * 2].view(-1, 2).t() for name, t in tensors.items()}
    same(sent(TensorSource(tensors.items())), tensors)


def test_many_small_tensors_arrive() -> None:
    tensors = {f"t{n}": torch.full((n % 7,), float(n)) for n in range(3000)}
    same(sent(TensorSource(tensors.items()), dict.fromkeys(tensors, "bfloat16")), {
        name: t.to(torch.bfloat16) for name, t in tensors.items()
    })  # fmt: skip


def refused() -> list[tuple[str, Any, str]]:
    class Spread(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            return self

    return [
        ("meta", torch.empty(3, device="meta"), "meta device"),
        ("sparse", torch.eye(3).to_sparse(), "layout"),
        ("complex", torch.zeros(3, dtype=torch.complex64), "complex64"),
        ("number", 1.5, "float, not a tensor"),
        ("array", np.zeros(3), "ndarray, not a tensor"),
        ("spread", torch.zeros(3).as_subclass(Spread), "full_tensor"),
    ]


@pytest.mark.parametrize(("name", "value", "why"), refused(), ids=[name for name, _, _ in refused()])
def test_what_cannot_be_sent_is_refused_by_name(name: str, value: Any, why: str) -> None:
    with pytest.raises(OfferRejected, match=f"layer.{name} .*{why}") as caught:
        source_of({"fine": torch.zeros(2), f"layer.{name}": value})
    assert caught.value.fields["tensor"] == f"layer.{name}"


def test_everything_that_names_tensors_can_be_published(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 4)
            self.b = torch.nn.Linear(3, 4)
            self.b.weight = self.a.weight
            self.register_buffer("kept", torch.arange(5.0))
            self.register_buffer("scratch", torch.arange(5.0), persistent=False)

    model = Model()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    same(sent(source_of(model.named_parameters())), parameters)
    same(sent(source_of(dict(model.named_parameters()))), parameters)
    same(sent(source_of(list(parameters.items()))), parameters)
    found = sent(source_of(model))
    assert found.keys() == {"a.weight", "a.bias", "b.weight", "b.bias", "kept"}
    save_file(parameters, tmp_path / "model.safetensors")
    for path in (tmp_path, str(tmp_path / "model.safetensors")):
        checkpoint = source_of(path)
        same(sent(checkpoint), parameters)
        checkpoint.close()
    source = TensorSource(parameters.items())
    assert source_of(source) is source
    with pytest.raises(InvalidRequest, match="int is neither"):
        source_of(7)  # type: ignore[arg-type]


def test_a_source_is_what_the_port_asks_for() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int8)}
    source = TensorSource(tensors.items())
    assert [spec for spec, _ in source.tensors()] == list(source.specs())


# -- checkpoints ---------------------------------------------------------------------------------------------


def model() -> dict[str, torch.Tensor]:
    return {
        "embed": torch.randn(100, 16).to(torch.bfloat16),
        "norm": torch.randn(33),
        "wide": torch.randn(300_000),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 3),
        "codes": torch.randint(0, 255, (77,), dtype=torch.uint8),
        "double": torch.randn(50, dtype=torch.float64),
    }


def sharded(folder: Path, tensors: dict[str, torch.Tensor], count: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for n in range(count):
        file = f"model-{n + 1:05}-of-{count:05}.safetensors"
        shard = {name: t for k, (name, t) in enumerate(tensors.items()) if k % count == n}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_arrives_bit_for_bit(tmp_path: Path, shards: int, call_bytes: int) -> None:
    tensors = model()
    if shards == 1:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        sharded(tmp_path, tensors)
    source = CheckpointSource(tmp_path)
    same(sent(source), tensors)
    same({spec.name: tensor for spec, tensor in source.tensors()}, tensors)
    source.close()
    source.close()


def test_a_checkpoint_is_cast_as_it_is_read(tmp_path: Path, call_bytes: int) -> None:
    tensors = model()
    wire = {"wide": "bfloat16", "norm": "float16", "scalar": "bfloat16", "none": "bfloat16", "double": "float32"}
    source = CheckpointSource(sharded(tmp_path, tensors))
    expected = {name: t.to(getattr(torch, wire.get(name, str(t.dtype)[6:]))) for name, t in tensors.items()}
    same(sent(source, wire), expected)
    source.close()


def test_a_checkpoint_of_the_same_folder_is_read_anew(tmp_path: Path) -> None:
    for _ in range(2):
        tensors = model()
        source = CheckpointSource(sharded(tmp_path, tensors))
        same(sent(source), tensors)
        source.close()


def cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def listed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda f: (f / SECOND).unlink(), SECOND),
    "a shard is cut short": (lambda f: cut(f / SECOND, 1), SECOND),
    "a shard is empty": (lambda f: (f / FIRST).write_bytes(b""), FIRST),
    "a shard ends in its header": (lambda f: os.truncate(f / FIRST, 40), FIRST),
    "a shard has something behind it": (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"x"), FIRST),
    "a header is no JSON": (lambda f: (f / FIRST).write_bytes((8).to_bytes(8, "little") + b"{]{]{]{]"), FIRST),
    "the index is cut short": (lambda f: cut(f / INDEX, 10), INDEX),
    "the index is of another kind": (lambda f: (f / INDEX).write_text("[1]"), INDEX),
    "the index is missing": (lambda f: (f / INDEX).unlink(), "neither"),
    "the index lists a file elsewhere": (lambda f: listed(f, lambda i: i["weight_map"].update(norm="../x")), INDEX),
    "the index lists a tensor that is not there": (
        lambda f: listed(f, lambda i: i["weight_map"].update(ghost=FIRST)), "ghost"
    ),
    "a shard has a tensor that is not listed": (lambda f: listed(f, lambda i: i["weight_map"].pop("norm")), "norm"),
    "the folder is missing": (lambda f: f.rename(f.parent / "moved"), "does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("damage", BROKEN)
def test_a_half_written_folder_is_refused_and_the_file_named(tmp_path: Path, damage: str) -> None:
    folder = sharded(tmp_path / "checkpoint", model())
    breaks, name = BROKEN[damage]
    breaks(folder)
    with pytest.raises(CheckpointUnreadable, match=name) as caught:
        CheckpointSource(folder)
    assert caught.value.fields["file"]


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"odd": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnreadable, match="odd has the dtype C64"):
        CheckpointSource(tmp_path)


def rewritten(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)


def replaced(path: Path) -> None:
    other = path.with_name("new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize("change", [rewritten, replaced, Path.unlink, lambda p: cut(p, 3)])
@pytest.mark.parametrize("when", ["before it is read", "while it is read"])
def test_a_folder_that_changes_is_refused_and_the_file_named(
    tmp_path: Path, change: Callable[[Path], object], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_source, "CALL_BYTES", 4096)
    source = CheckpointSource(sharded(tmp_path, model()))
    segment = Segment(1 << 22)
    mapping = Mapping(segment.path, segment.nbytes, "write")
    segment.close()
    placed, _ = place(source.specs())
    slots = [Slot(n, p.spec.dtype, p.offset) for n, p in enumerate(placed)]
    reading = source.pack(slots, mapping, np.zeros(len(slots), np.uint64))
    if when == "while it is read":
        next(reading)
    os.utime(tmp_path / FIRST, ns=(0, 0)) if change is rewritten else None
    change(tmp_path / FIRST)
    with pytest.raises(CheckpointUnreadable, match=FIRST):
        list(reading)
    source.close()
    assert not [name for name in os.listdir("/proc/self/fd") if "safetensors" in _target(name)]


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""
