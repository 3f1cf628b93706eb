"""The GPU half of the bucket ring, on a GPU: digests, rates, and two processes that share a ring. Run as a script.

    python3 tests/gpu/ring_h200.py OUT.json

Every section writes what it saw, or its error; one that fails does not stop the next. Needs one GPU, torch and numpy;
with Triton the kernels are measured, without it their stand-in.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
LIMIT_S = 145.0
STEP_S = 20.0

if "pitstop" not in sys.modules:
    # The packages without what their `__init__` imports: a GPU's machine may have neither zmq nor msgspec.
    for package in ("pitstop", "pitstop.engine", "pitstop.transports"):
        sys.modules[package] = module = ModuleType(package)
        module.__path__ = [str(ROOT.joinpath(*package.split(".")[1:]))]
        setattr(sys.modules["pitstop"], package.rpartition(".")[2], module)

from pitstop.engine.errors import PeerLost, PitstopError  # noqa: E402
from pitstop.engine.worker_ports import TensorSpec  # noqa: E402
from pitstop.transports.buckets import cut  # noqa: E402
from pitstop.transports.digest import STEP, reference  # noqa: E402

# ---------------------------------------------------------------- digests


def digested(rows: Sequence[tuple[Any, int, int]], targets: Sequence[Any] = ()) -> list[int]:
    """Digest flat byte tensors: (bytes, itemsize, start) a row, all in one bucket."""
    import numpy as np
    import torch

    from pitstop.transports.digest_cuda import CudaWork
    from pitstop.transports.digest_table import Parts

    n = len(rows)

    def column(values: Iterable[int]) -> Any:
        return np.array(list(values), np.int64)

    parts = Parts(
        np.zeros(n, np.int64), np.arange(n), column(w for _, w, _ in rows), column(s for _, _, s in rows),
        column(t.numel() // w for t, w, _ in rows), column(t.data_ptr() for t, _, _ in rows),
        column(t.data_ptr() for t in targets) if targets else np.zeros(n, np.int64), np.zeros(n, np.bool_),
    )  # fmt: skip
    work = CudaWork(torch.device("cuda", 0), n, parts, "source")
    work.run(0, np.zeros(n, np.int64))
    return [int(value) for value in work.digests()]


@contextmanager
def by_torch() -> Iterator[None]:
    import torch

    from pitstop.transports import digest_cuda

    device = torch.device("cuda", 0)
    launch, keys = digest_cuda.prepare(device)
    digest_cuda._prepared[device] = (None, keys)
    try:
        yield
    finally:
        digest_cuda._prepared[device] = (launch, keys)


def digests() -> dict[str, Any]:
    import numpy as np
    import torch

    from pitstop.transports import digest_cuda

    device = torch.device("cuda", 0)
    began = time.perf_counter()
    launch, _ = digest_cuda.prepare(device)
    out: dict[str, Any] = {"prepare_s": round(time.perf_counter() - began, 2), "triton": launch is not None}
    store = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    there = torch.from_numpy(store).to(device)
    cases = [
        (width, skip, start, count)
        for width in (1, 2, 4, 8)
        for skip in (0, 2, 16, 512)
        for start in (0, 1, 256, 1023, 5_000_000_003)
        for count in (0, 1, 3, 511, 1024, 1025, 16_384, 50_001)
    ]
    rows = [(there[skip : skip + count * width], width, start) for width, skip, start, count in cases]
    wanted = [
        reference(store[skip : skip + count * width].tobytes(), width, start) for width, skip, start, count in cases
    ]
    for name, every in (("kernel", 1), ("torch", 7)):
        chosen = range(0, len(cases), every)
        for copies in (False, True):
            targets = [torch.empty_like(rows[n][0]) for n in chosen] if copies else []
            with by_torch() if name == "torch" else nullcontext():
                found = digested([rows[n] for n in chosen], targets)
            wrong = [cases[n] for n, has in zip(chosen, found, strict=True) if has != wanted[n]]
            torn = [cases[n] for n, t in zip(chosen, targets, strict=False) if not torch.equal(rows[n][0], t)]
            out[f"{name}{'_copy' if copies else ''}"] = {"cases": len(chosen), "wrong": wrong[:5], "torn": torn[:5]}
    plain = there[: 1 << 19]
    whole = digested([(plain, 2, 0)])
    missed = 0
    for place in (0, 1, 77_777, (1 << 19) - 1):
        damaged = plain.clone()
        damaged[place] ^= 1 << place % 8
        missed += digested([(damaged, 2, 0)]) == whole
    swapped = plain.clone().view(torch.int16)
    swapped[[3, 200_003]] = swapped[[200_003, 3]]
    missed += digested([(swapped.view(torch.uint8), 2, 0)]) == whole
    out["damage_missed"] = missed
    return out


def long_tensors() -> dict[str, Any]:
    """More than 2**31 words: zeros with islands, whose digest follows from the definition's linearity."""
    import numpy as np
    import torch

    out = {}
    for width in (1, 2):
        words = (1 << 31) + 123_457
        tensor = torch.zeros(words * width, dtype=torch.uint8, device="cuda")
        expected = STEP * words
        for n, at in enumerate((0, (1 << 30) + 77, (1 << 31) - 900, words - 5000)):
            island = np.random.default_rng(n).integers(0, 256, 4000 * width, np.uint8)
            tensor[at * width : at * width + island.size] = torch.from_numpy(island).cuda()
            expected += reference(island.tobytes(), width, at) - STEP * 4000
        target = torch.empty_like(tensor)
        copied = digested([(tensor, width, 0)], [target])[0] == expected % (1 << 64)
        out[f"{width}_byte_words"] = {
            "copy": copied, "equal": bool(torch.equal(tensor, target)),
            "check": digested([(tensor, width, 0)])[0] == expected % (1 << 64),
        }  # fmt: skip
        del tensor, target
    return out


# ---------------------------------------------------------------- rates


def timed(call: Callable[[], object], repeat: int = 5) -> float:
    """Return the median seconds on the GPU and the host together."""
    import torch

    call()
    seconds = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def sizes(nbytes: int, count: int) -> list[int]:
    """Return the numbers of bf16 elements of `count` tensors, unlike one another."""
    mean = nbytes // 2 // count
    return [mean + (n % 7 - 3) * (mean // 16 // 8 * 8) for n in range(count)]


def rates(nbytes: int, count: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from pitstop.transports.cuda_memory import LentRing
    from pitstop.transports.cuda_ring import Pourer
    from pitstop.transports.digest_cuda import CudaWork
    from pitstop.transports.digest_table import parts_of

    device = torch.device("cuda", 0)
    tensors = [torch.empty(n, dtype=torch.bfloat16, device=device).fill_(0.5) for n in sizes(nbytes, count)]
    targets = [torch.empty_like(t) for t in tensors]
    specs = [TensorSpec(str(n), "bfloat16", tuple(t.shape)) for n, t in enumerate(tensors)]
    total = sum(t.nbytes for t in tensors)
    addresses = np.array([t.data_ptr() for t in tensors], np.int64)
    aims = np.array([t.data_ptr() for t in targets], np.int64)
    flat = [torch.empty(total, dtype=torch.uint8, device=device) for _ in range(2)]
    out: dict[str, Any] = {"nbytes": total, "tensors": count}

    def rate(name: str, call: Callable[[], object]) -> None:
        seconds = timed(call)
        out[name] = {"ms": round(seconds * 1e3, 3), "GB/s": round(total / seconds / 1e9, 1)}

    rate("one copy_", lambda: flat[0].copy_(flat[1]))
    flat.clear()
    if count < 1000:
        rate("copy_ a tensor", lambda: [b.copy_(a) for a, b in zip(tensors, targets, strict=True)])
    rate("_foreach_copy_", lambda: torch._foreach_copy_(targets, tensors))
    whole = cut(specs, (total // 512 + count + 1) * 512)
    parts = parts_of(specs, whole, 0, 1, 0, "source")
    parts = replace(parts, target=aims[parts.row])
    began = time.perf_counter()
    work = CudaWork(device, count, parts, "source", addresses)
    out["table_ms"] = round((time.perf_counter() - began) * 1e3, 2)
    out["chunks"] = int(work._owners.numel())
    rate("copy and digest", lambda: work.run(0, addresses))
    check = CudaWork(device, count, replace(parts, target=np.zeros_like(parts.target)), "source", addresses)
    rate("check", lambda: check.run(0, addresses))
    out["equal"] = all(torch.equal(a, b) for a, b in zip(tensors[:200], targets[:200], strict=True))
    targets.clear()
    for slot_mib, slots in ((64, 4), (16, 8)):
        ring = LentRing(device, slots * slot_mib << 20)
        pourer = Pourer(tensors, specs, ring, slots, slot_mib << 20)
        fences: list[Any] = []
        host: list[float] = []

        def pour(pourer: Any = pourer, fences: list[Any] = fences, host: list[float] = host) -> None:
            began = time.perf_counter()
            fences[:] = [pourer.pour(n) for n in range(pourer.buckets)]
            host.append((time.perf_counter() - began) / pourer.buckets)

        rate(f"pour {slot_mib} MiB, no reader", pour)
        out[f"pour {slot_mib} MiB, no reader"]["host_us_a_bucket"] = round(min(host) * 1e6, 1)
        ring.close()
    return out


def variants() -> dict[str, Any]:
    """The kernel's settings, on 1 GiB: GB/s of a copy with digest, and of a check."""
    import numpy as np
    import torch

    from pitstop.transports import digest_triton
    from pitstop.transports.digest_cuda import CudaWork
    from pitstop.transports.digest_table import parts_of

    device = torch.device("cuda", 0)
    tensor, target = (torch.empty(GIB, dtype=torch.uint8, device=device) for _ in range(2))
    tensor.random_(0, 255)
    out: dict[str, Any] = {}

    def measure(name: str, spec: TensorSpec, chunk: int, skip: int = 0, narrow: bool = False) -> None:
        parts = parts_of([spec], cut([spec], 2 * GIB), target.data_ptr(), 1, 0, "source", [narrow])
        address = np.array([tensor.data_ptr() + skip], np.int64)
        work = CudaWork(device, 1, parts, "source", address, chunk=chunk)
        copy_s = timed(lambda: work.run(0, address), 3)
        found = [copy_s]
        if not narrow:
            only = replace(parts, target=np.zeros_like(parts.target))
            check = CudaWork(device, 1, only, "source", address, chunk=chunk)
            found.append(timed(lambda: check.run(0, address), 3))
        out[name] = [round(spec.nbytes / s / 1e9) for s in found]

    halves = TensorSpec("halves", "bfloat16", (GIB // 2,))
    kept = digest_triton.WARPS, digest_triton.BLOCKS
    for warps, blocks in ((1, 4), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8)):
        digest_triton.WARPS, digest_triton.BLOCKS = warps, blocks
        for chunk in (16, 32, 64):
            measure(f"{warps} warps, {blocks} blocks, chunk {chunk}", halves, chunk)
    digest_triton.WARPS, digest_triton.BLOCKS = kept
    measure("bytes", TensorSpec("bytes", "uint8", (GIB,)), 16)
    measure("float32", TensorSpec("floats", "float32", (GIB // 4,)), 16)
    measure("float32 to bfloat16 (GB/s written)", TensorSpec("masters", "bfloat16", (GIB // 4,)), 16, narrow=True)
    measure("at 2 bytes past 16", TensorSpec("odd", "bfloat16", (GIB // 2 - 8,)), 16, skip=2)
    with by_torch():
        measure("torch instead", TensorSpec("plain", "bfloat16", (GIB // 8,)), 16)
    return out


# ---------------------------------------------------------------- two processes


def version(seed: int, nbytes: int) -> dict[str, Any]:
    """Make a version: the same in either process."""
    import torch

    made = torch.Generator(device="cuda").manual_seed(seed)

    def bits(*shape: int) -> Any:
        return torch.randint(-32768, 32767, shape, dtype=torch.int16, device="cuda", generator=made)

    tensors = {f"layer {n}": bits(count).view(torch.bfloat16) for n, count in enumerate(sizes(nbytes, 150))}
    tensors |= {f"bias {n}": bits(896).view(torch.bfloat16) for n in range(300)}
    tensors["none"] = torch.zeros(0, 3, device="cuda")
    tensors["scale"] = torch.tensor(float(seed), device="cuda")
    tensors["fp8"] = bits(5000, 11).view(torch.float8_e4m3fn)
    tensors["ids"] = bits(10_001).to(torch.int64)
    tensors["turned"] = bits(2000, 3000).view(torch.bfloat16).t()
    tensors["masters"] = torch.randn(3_000_001, device="cuda", generator=made)
    tensors["halves"] = torch.randn(70_001, device="cuda", generator=made)
    return tensors


WIRE = {"masters": "bfloat16", "halves": "float16"}


def specs_of(tensors: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(n, WIRE.get(n, str(t.dtype).removeprefix("torch.")), tuple(t.shape)) for n, t in tensors.items()]


def trainer(pipe: Any, nbytes: int, slots: int, slot: int, environment: dict[str, str]) -> None:
    """The child: lends a ring, and pours a version whenever it is told its number."""
    os.environ.update(environment)
    import torch

    from pitstop.transports.cuda_memory import LentRing, device_id
    from pitstop.transports.cuda_ring import Pourer
    from pitstop.transports.digest_cuda import prepare

    device = torch.device("cuda", 0)
    try:
        prepare(device)
        ring = LentRing(device, slots * slot)
        pipe.send((device_id(device), ring.handle))
        while (seed := pipe.recv()) is not None:
            tensors = version(seed, nbytes)
            ready = torch.cuda.current_stream(device).record_event()
            pipe.send("made")
            pipe.recv()
            began = time.perf_counter()
            pourer = Pourer(list(tensors.values()), specs_of(tensors), ring, slots, slot, [ready])
            begun = time.perf_counter() - began
            poured = filled = drained = 0
            fences: deque[Any] = deque()
            while filled < pourer.buckets:
                assert time.perf_counter() - began < STEP_S, f"{filled} of {pourer.buckets} filled, {drained} drained"
                while pipe.poll(0):
                    drained = pipe.recv()
                while poured < min(pourer.buckets, drained + slots):
                    fences.append(pourer.pour(poured))
                    poured += 1
                before = filled
                while fences and pourer.done(fences[0]):
                    fences.popleft()
                    filled += 1
                if filled > before:
                    pipe.send(filled)
                else:
                    time.sleep(2e-5)
            while drained < pourer.buckets:
                drained = pipe.recv()
            pipe.send((begun, pourer.digests().tolist()))
        ring.close()
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


class Peer:
    """The child, as its parent sees it."""

    def __init__(self, nbytes: int, slots: int, slot: int, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, nbytes, slots, slot, environment)
        self.process = context.Process(target=trainer, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, seconds: float = STEP_S) -> Any:
        if not self.pipe.poll(seconds):
            raise TimeoutError("the trainer said nothing")
        said = self.pipe.recv()
        if isinstance(said, str) and said != "made":
            raise RuntimeError(f"the trainer failed: {said}")
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


def flat(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def receive(
    peer: Peer, ring: Any, seed: int, nbytes: int, slots: int, slot: int, *,
    in_place: bool = False, nap_s: float = 0.0, buffer: Any = None, kill_at: float = 2.0,
) -> dict[str, Any]:  # fmt: skip
    import torch

    from pitstop.transports.cuda_ring import Drainer

    peer.pipe.send(seed)
    assert peer.hear() == "made"
    expected = version(seed, nbytes)
    specs = specs_of(expected)
    torch.cuda.synchronize()
    found: dict[str, Any] = {}
    peer.pipe.send("go")
    began = time.perf_counter()
    drainer = Drainer(ring, specs, slots, slot, live={} if in_place else None, buffer=buffer)
    begun = time.perf_counter() - began
    drained = reads = 0
    in_drain = 0.0
    while drained < drainer.buckets:
        filled = peer.hear()
        if filled > kill_at * drainer.buckets:
            peer.process.kill()
            peer.process.join(10)
            kill_at = 2.0
        if nap_s:
            time.sleep(nap_s)
        at = time.perf_counter()
        rows = drainer.drain(*range(drained, filled), seconds=STEP_S)
        in_drain += time.perf_counter() - at
        if in_place:
            found |= {spec.name: tensor for spec, tensor in drainer.tensors(rows)}
        drained, reads = filled, reads + 1
        peer.pipe.send(drained)
    seconds = time.perf_counter() - began
    if not in_place:
        found = {spec.name: tensor for spec, tensor in drainer.tensors(range(len(specs)))}
    their_start, theirs = peer.hear()
    wrong = []
    for spec in specs:
        want = expected[spec.name].to(getattr(torch, spec.dtype)).contiguous()
        has = found[spec.name]
        same = has.shape == want.shape and torch.equal(flat(has), flat(want))
        wrong += [] if same else [spec.name]
    total = sum(spec.nbytes for spec in specs)
    return {
        "GB/s": round(total / seconds / 1e9, 1), "ms": round(seconds * 1e3, 1), "drain_ms": round(in_drain * 1e3, 1),
        "buckets": drainer.buckets, "reads": reads, "made_ms": [round(begun * 1e3, 1), round(their_start * 1e3, 1)],
        "wrong": wrong, "digests_equal": drainer.digests().tolist() == theirs, "_buffer": drainer.buffer,
    }  # fmt: skip


def together(
    nbytes: int, slots: int, slot_mib: int, environment: dict[str, str] | None = None, few: bool = False
) -> dict[str, Any]:
    import torch

    from pitstop.transports.cuda_memory import borrow, device_of, forget
    from pitstop.transports.digest_cuda import prepare

    slot, buffer = slot_mib << 20, None
    out: dict[str, Any] = {}
    began = time.perf_counter()
    prepare(torch.device("cuda", 0))
    peer = Peer(nbytes, slots, slot, environment or {})
    try:
        identity, handle = peer.hear(40.0)
        out["start_s"] = round(time.perf_counter() - began, 2)
        out["device"] = identity
        ring = borrow("engine", device_of(identity), handle, slots * slot)
        for seed, how in enumerate(("staged", "staged again", "in place", "with naps")[: 2 if few else 4]):
            seen = receive(
                peer, ring, seed, nbytes, slots, slot,
                in_place=how == "in place", nap_s=0.01 if how == "with naps" else 0.0, buffer=buffer,
            )  # fmt: skip
            buffer = seen.pop("_buffer") if seen["_buffer"] is not None else buffer
            seen.pop("_buffer", None)
            out[how] = seen
        peer.pipe.send(None)
        peer.process.join(10)
        out["exit"] = peer.process.exitcode
        del ring
        forget("engine")
        torch.ones(10, device="cuda").sum().item()
    finally:
        peer.end()
    return out


def killed() -> dict[str, Any]:
    """The trainer is killed in the middle; the receiver goes on, with the next trainer."""
    import torch

    from pitstop.transports.cuda_memory import BorrowedRing, borrow, device_of, forget
    from pitstop.transports.cuda_ring import Drainer

    nbytes, slots, slot = GIB, 4, 16 << 20
    out: dict[str, Any] = {}
    peer = Peer(nbytes, slots, slot, {})
    try:
        identity, handle = peer.hear(40.0)
        device = device_of(identity)
        ring = borrow("engine", device, handle, slots * slot)
        try:
            receive(peer, ring, 0, nbytes, slots, slot, kill_at=0.4)
        except (EOFError, OSError) as error:
            out["noticed_as"] = type(error).__name__
        specs = [TensorSpec("rest", "bfloat16", (slot // 2,))]
        draining = Drainer(ring, specs, slots, slot)
        draining.drain(0, seconds=STEP_S)
        out["still_readable"] = True
        del draining
        first = time.perf_counter()
        del ring
        forget("engine")
        out["closed_s"] = round(time.perf_counter() - first, 4)
        torch.ones(10, device="cuda").sum().item()
        try:
            BorrowedRing(device, handle, slots * slot).close()
            out["handle_of_the_dead"] = "opens"
        except PeerLost as error:
            out["handle_of_the_dead"] = error.message
        except PitstopError as error:
            out["handle_of_the_dead"] = f"{type(error).__name__}: {error.message}"
    finally:
        peer.end()
    free = torch.cuda.mem_get_info()[0]
    out["free_gib"] = round(free / GIB, 1)
    out["next_trainer"] = together(nbytes // 4, slots, 16, few=True)
    return out


def own_handle() -> dict[str, Any]:
    """What CUDA says to a process that opens a handle of its own; and how long the calls take."""
    import torch

    from pitstop.transports.cuda_memory import BorrowedRing, LentRing, over

    device = torch.device("cuda", 0)
    began = time.perf_counter()
    ring = LentRing(device, 256 << 20)
    out: dict[str, Any] = {"lend_ms": round((time.perf_counter() - began) * 1e3, 2)}
    view = over(ring.address, 1000, device, ring)
    out["view"] = [view.data_ptr() == ring.address, str(view.device), int(view.fill_(3).sum())]
    try:
        BorrowedRing(device, ring.handle, ring.nbytes).close()
        out["own"] = "opens"
    except PitstopError as error:
        out["own"] = f"{type(error).__name__}: {error.message}"
    torch.ones(10, device="cuda").sum().item()
    ring.close()
    return out


# ---------------------------------------------------------------- the run

SECTIONS: dict[str, Callable[[], Any]] = {
    "own handle": own_handle,
    "digests": digests,
    "long tensors": long_tensors,
    "two processes, 4 x 64 MiB": lambda: together(GIB, 4, 64),
    "two processes, 8 x 16 MiB": lambda: together(GIB, 8, 16),
    "killed": killed,
    "two processes, expandable segments": lambda: together(
        GIB, 4, 64, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, few=True
    ),
    "rates, 300 of 1 GiB": lambda: rates(GIB, 300),
    "rates, 18000 of 1 GiB": lambda: rates(GIB, 18_000),
    "rates, 300 of 14 GiB": lambda: rates(14 * GIB, 300),
    "rates, 18000 of 14 GiB": lambda: rates(14 * GIB, 18_000),
    "variants": variants,
    "two processes, 3 x 256 MiB of 4 GiB": lambda: together(4 * GIB, 3, 256, few=True),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    import torch

    began = time.monotonic()
    found: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)}

    def write() -> None:
        args.out.write_text(json.dumps(found, indent=1, default=str))

    def expire() -> None:
        found["expired_in"] = found.pop("_now", "?")
        write()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(3)

    clock = threading.Timer(LIMIT_S, expire)
    clock.daemon = True
    clock.start()
    signal.signal(signal.SIGTERM, lambda *_: expire())
    for name, section in SECTIONS.items():
        if args.only and not any(part in name for part in args.only):
            continue
        at = time.monotonic()
        found["_now"] = name
        try:
            found[name] = section()
        except Exception:  # noqa: BLE001 - the next section may still say something
            found[name] = {"failed": traceback.format_exc()}
        found[name]["section_s"] = round(time.monotonic() - at, 1)
        torch.cuda.empty_cache()
        write()
        print(name, json.dumps(found[name], default=str)[:1500], flush=True)  # noqa: T201
    found.pop("_now", None)
    found["total_s"] = round(time.monotonic() - began, 1)
    clock.cancel()
    write()


if __name__ == "__main__":
    main()
