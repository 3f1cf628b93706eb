"""What does a swap cost? A staged version put into live parameters by a load plan, beside a plain copy and the loader.

The model is one of experts: each expert's gate, up and down projection is a tensor of the checkpoint, and lands in a
part of a fused parameter, as in vLLM's fused mixture of experts. The same bytes come once in few tensors and once in
many. In turns, nine times: one copy of the same bytes (the floor), the plan's batched copies, the model's own
`load_weights` (what vLLM does without a reload), for few tensors and for many. Prints one JSON object: medians in
milliseconds, spreads, and ratios. Budget: many tensors at most 3 times the time of few.

    python benchmarks/load_plan.py [--device cuda] [--mib 1024] [--few 300] [--many 18000] [--pairs 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pitstop.engine.vllm_backend.plan import learn
from pitstop.engine.vllm_backend.planned import Live, Planned
from pitstop.engine.worker_ports import TensorSpec

HIDDEN = 1024


class Experts(nn.Module):
    """Layers of fused experts, loaded expert by expert."""

    def __init__(self, layers: int, experts: int, inner: int, device: str) -> None:
        super().__init__()
        self.experts, self.inner = experts, inner
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer: Any = nn.Module()
            for name, shape in (("w13", (experts, 2 * inner, HIDDEN)), ("w2", (experts, HIDDEN, inner))):
                data = torch.empty(shape, dtype=torch.bfloat16, device=device)
                layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
            self.layers.append(layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put each tensor where it belongs."""
        for name, tensor in weights:
            layer, expert, part = name.split(".")
            live: Any = self.layers[int(layer)]
            if part == "down":
                live.w2.data[int(expert)].copy_(tensor)
            else:
                live.w13.data[int(expert)].narrow(0, self.inner * (part == "up"), self.inner).copy_(tensor)


def sizes(nbytes: int, tensors: int) -> tuple[int, int, int]:
    """Return layers, experts of each, and rows of a projection."""
    layers = 4
    experts = max(1, tensors // (3 * layers))
    return layers, experts, max(1, nbytes // (2 * HIDDEN * 3 * layers * experts))


class Case:
    """One model with a staged version beside it."""

    def __init__(self, nbytes: int, tensors: int, device: str) -> None:
        layers, experts, inner = sizes(nbytes, tensors)
        self.model = Experts(layers, experts, inner, device)
        self.staged = []
        for layer in range(layers):
            for expert in range(experts):
                for part, shape in (
                    ("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner)),
                ):  # fmt: skip
                    content = torch.randn(shape, device=device).to(torch.bfloat16)
                    self.staged.append((TensorSpec(f"{layer}.{expert}.{part}", "bfloat16", shape), content))
        self.nbytes = sum(spec.nbytes for spec, _ in self.staged)
        plan = learn(self.model, [spec for spec, _ in self.staged], cpu=device == "cpu")
        self._planned = Planned(plan, None, Live(self.model), torch.device(device))

    def ready(self) -> None:
        self._planned.ready(self.staged)

    def swap(self) -> None:
        self._planned.begin()
        self._planned.feed(self.staged)

    def load(self) -> None:
        self.model.load_weights((spec.name, tensor) for spec, tensor in self.staged)

    def check(self) -> None:
        """Look whether the plan makes what the loader makes."""
        for value in self.model.parameters():
            value.data.zero_()
        self.ready()
        self.swap()
        made = [value.clone() for value in self.model.parameters()]
        self.load()
        assert all(torch.equal(one, other) for one, other in zip(made, self.model.parameters(), strict=True))


def timed(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--few", type=int, default=300)
    parser.add_argument("--many", type=int, default=18000)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: Case(args.mib << 20, getattr(args, name), args.device) for name in ("few", "many")}
    floor = torch.ones(cases["few"].nbytes, dtype=torch.uint8, device=args.device)
    there = torch.zeros_like(floor)
    took: dict[str, list[float]] = {}
    for turn in range(args.pairs + 1):
        found = {"copy": timed(lambda: there.copy_(floor), args.device)}
        for name, case in cases.items():
            found[f"{name}_ready"] = timed(case.ready, args.device)
            found[f"{name}_swap"] = timed(case.swap, args.device)
            found[f"{name}_loader"] = timed(case.load, args.device)
        if turn:  # the first one touches memory
            for key, value in found.items():
                took.setdefault(key, []).append(value)
    for case in cases.values():
        case.check()
    middle = {key: statistics.median(values) for key, values in took.items()}
    out = {
        "benchmark": "load_plan", "device": args.device, "bytes": {n: c.nbytes for n, c in cases.items()},
        "tensors": {n: len(c.staged) for n, c in cases.items()},
        "ms": {key: round(value, 2) for key, value in middle.items()},
        "spread_ms": {key: [round(min(v), 2), round(max(v), 2)] for key, v in took.items()},
        "swap_to_copy": round(middle["few_swap"] / middle["copy"], 3),
        "swap_to_loader": {n: round(middle[f"{n}_swap"] / middle[f"{n}_loader"], 3) for n in cases},
        "many_to_few": round(middle["many_swap"] / middle["few_swap"], 3),
    }  # fmt: skip
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
