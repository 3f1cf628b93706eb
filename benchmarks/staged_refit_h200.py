"""A staged refit of 7B shapes under 64 live streams, beside vLLM's own weight transfer. Run by hand on a GPU host.

    python3 benchmarks/staged_refit_h200.py OUT.json [--peer PEER.py] [--pace 12 --pace 0 ...] [--gpu-memory 0.4]

Trainer and engine share the first GPU. The peer is `benchmarks/peer_vllm_ipc.py` (one GPU), or the mission's
`peer_vllm025_nccl.py` (two); it runs after ours, in this run, and the better of its ways counts.
A `--pace` is in GiB/s, 0 for none: each is an engine of its own. Streams end at different times, so that their rate is
steady; it is measured anew before each refit. Measured are the rate while a version is staged and in the second after
its commit, both as parts of that, the longest time without a token of any stream (as the peer
measures it), the bubble by our own report, and the total: medians of `--refits` by policy (`keep` as the peer's; the
first version, which proves the load plan, does not count). With `--gpu-memory 0.7` a GPU of 139 GiB has no room, and
the version is staged in host memory, as the output then says. Budgets: DESIGN 10.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pitstop.engine.ports import NullObserver, Scalar, Transition, Work

STREAMS = 64
SECOND = 1_000_000_000
PEER_S = 420.0
_LINE = re.compile(r"mode=\w+ clear=\w+ (?:packed=(\w+) )?.*total ([\d.]+) bubble ([\d.]+|nan)")
_STEADY = re.compile(r"steady tok/s ([\d.]+)")


class Stamps:
    """When tokens came, and how many."""

    def __init__(self) -> None:
        self._at: list[int] = []
        self._sum = [0]

    def add(self, at: int, tokens: int) -> None:
        """So many came at that nanosecond, not before the last ones."""
        self._at.append(at)
        self._sum.append(self._sum[-1] + tokens)

    def rate(self, begin: int, end: int) -> float:
        """Tokens per second between two nanoseconds."""
        low, high = bisect_left(self._at, begin), bisect_right(self._at, end)
        return (self._sum[high] - self._sum[low]) / max(1, end - begin) * 1e9

    def gap(self, moment: int) -> float:
        """Seconds from the last token up to a moment to the first one after it; nan if there is none on a side."""
        behind = bisect_right(self._at, moment)
        return (self._at[behind] - self._at[behind - 1]) / 1e9 if 0 < behind < len(self._at) else float("nan")


class Watch(NullObserver):
    """When versions were staged, and when a suspended replica had its weights and served again."""

    def __init__(self) -> None:
        self.stages: list[tuple[int, int]] = []
        self.swaps: list[tuple[int, int]] = []
        self._loaded = 0
        self._open: dict[str, int] = {}

    def opened(self, work: Work) -> Mapping[str, str]:
        """Note when staging begins."""
        self._open[work.key] = work.at
        return work.headers

    def closed(self, key: str, at: int, error: str | None = None, detail: Mapping[str, Scalar] | None = None) -> None:
        """Note when it ends."""
        began = self._open.pop(key, None)
        if began is not None and key.startswith("stage:") and error is None:
            self.stages.append((began, at))

    def transition(self, change: Transition) -> None:
        """Note when a suspended replica had its weights, and when it served again."""
        if change.after.value == "resuming":
            self._loaded = change.at
        elif change.after.value == "serving" and self._loaded:
            self.swaps.append((self._loaded, change.at))
            self._loaded = 0


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of some values, the least and the most; those that could not be measured are left out.

    Raises:
        ValueError: none could be.
    """
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        raise ValueError("nothing was measured: no token came before or after")
    return {
        "median": round(statistics.median(ordered), 5), "least": round(ordered[0], 5), "most": round(ordered[-1], 5)
    }  # fmt: skip


def peer_of(printed: str) -> dict[str, Any]:
    """Return what the peer printed: its rate, and of its refits the seconds in all and without a token.

    The first refit of each way warms it up. Of two ways the one with the shorter median bubble counts.
    """
    ways: dict[str, list[tuple[float, float]]] = {}
    for packed, total, bubble in _LINE.findall(printed):
        way = {"False": "in one call", "True": "packed", "": "nccl"}[packed]
        ways.setdefault(way, []).append((float(total), float(bubble)))
    steady = _STEADY.search(printed)
    found: dict[str, dict[str, Any]] = {
        way: {
            "refits": len(refits) - 1, "total_s": spread([total for total, _ in refits[1:]]),
            "bubble_s": spread([bubble for _, bubble in refits[1:]]),
        } for way, refits in ways.items() if len(refits) > 1
    }  # fmt: skip
    if not found or steady is None:
        raise ValueError(f"the peer printed no refit: {printed[-500:]!r}")
    best = min(found, key=lambda way: found[way]["bubble_s"]["median"])
    return {"steady_tok_s": float(steady[1]), "way": best, **found[best], "ways": found}


def peer(script: Path, model: Path) -> dict[str, Any]:
    """Run the peer."""
    try:
        done = subprocess.run(
            [sys.executable, str(script), str(model)], capture_output=True, text=True, timeout=PEER_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return {"failed": f"it did not end within {PEER_S:g} s: {(late.stdout or b'')[-2000:]!r}"}
    try:
        return {**peer_of(done.stdout), "printed": done.stdout.splitlines()}
    except ValueError as error:
        return {"failed": f"{error}; {done.stderr[-4000:]}"}


def found(stamps: Stamps, watch: Watch, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one engine's refits."""
    rows: list[tuple[Any, tuple[int, int], tuple[int, int]]] = list(
        zip(reports, watch.stages, watch.swaps, strict=True)
    )
    out: dict[str, Any] = {"steady_tok_s": spread([report["steady"] for report in reports])}
    for policy in dict.fromkeys(report["policy"] for report, *_ in rows):
        mine = [row for row in rows if row[0]["policy"] == policy]
        kept = [report for report, *_ in mine]
        out[policy] = {
            "refits": len(mine), "staging": sorted({r["staging"] for r in kept}), "why": kept[-1]["why"],
            "nbytes": kept[-1]["nbytes"],
            "staging_ratio": spread([stamps.rate(*stage) / r["steady"] for r, stage, _ in mine]),
            "after_ratio": spread([stamps.rate(at, at + SECOND) / r["steady"] for r, _, (_, at) in mine]),
            "bubble_s": spread([stamps.gap(loaded) for *_, (loaded, _) in mine]),
            "reported_bubble_s": spread([r["bubble_s"] for r in kept if r["bubble_s"] is not None]),
            "total_s": spread([r["seconds"] for r in kept]),
            "phase_s": {
                key: spread([r[key] for r in kept])
                for key in ("stage_s", "suspend_s", "receive_s", "finalize_s", "resume_s") if key in kept[-1]
            },
        }  # fmt: skip
    return out


async def ours(path: Path, pace: float, refits: int, gpu_memory: float) -> dict[str, Any]:
    """Refit one engine some times under streams that never end."""
    from pitstop.engine import RolloutEngine
    from pitstop.transports import Buffers
    from tests.gpu.ipc_h200 import LONG, Child, launch
    from tests.gpu.refit_h200 import prompt

    stamps, watch, stop = Stamps(), Watch(), False

    async def stream(engine: RolloutEngine, n: int) -> None:
        asked = replace(LONG, max_tokens=(LONG.max_tokens or 0) * (n + 1) // STREAMS)
        while not stop:
            async for chunk in engine.stream(prompt(n), asked):
                stamps.add(time.time_ns(), len(chunk.token_ids))
                if stop:
                    break
            asked = LONG

    buffers = Buffers(stage_nbytes_per_s=int(pace * (1 << 30)) or None)
    more = {"load_format": "dummy", "gpu_memory_utilization": gpu_memory}
    async with launch(path, buffers=buffers, observer=watch, **more) as engine:
        trainer = Child(engine.address, [path, path])
        assert await trainer.answer() == "ready"
        # It proves the load plan, and before it nothing is served.
        await trainer.ask("publish", 0, 1, {"mode": "staged"})
        watch.stages.clear()
        watch.swaps.clear()
        streams = [asyncio.create_task(stream(engine, n)) for n in range(STREAMS)]
        await asyncio.sleep(6)
        reports = []
        for version, policy in enumerate(["keep"] * refits + ["recompute"] * refits, 2):
            began = time.time_ns()
            await asyncio.sleep(1.5)
            steady = stamps.rate(began, time.time_ns())
            report = await trainer.ask("publish", version % 2, version, {"mode": "staged", "policy": policy})
            reports.append({**report, "policy": policy, "steady": steady})
            await asyncio.sleep(1.5)
        stop = True
        await asyncio.wait_for(asyncio.gather(*streams), 10)
        trainer.pipe.send(None)
    failed = [report for report in reports if report.get("outcome") != "committed"]
    return {"failed": failed} if failed else found(stamps, watch, reports)


def compared(out: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios that DESIGN 10 has budgets for, by pace and policy."""
    theirs = out.get("peer", {})
    return {
        f"{name} {policy}": {
            "staging_ratio": one["staging_ratio"]["median"],
            **{
                f"{what}_to_peer": round(one[f"{what}_s"]["median"] / theirs[f"{what}_s"]["median"], 4)
                for what in ("bubble", "total") if "refits" in theirs
            },
        }
        for name, engine in out["ours"].items() for policy, one in engine.items() if "refits" in one
    }  # fmt: skip


def main() -> None:
    """Measure, and write everything after each part: a run that is cut short tells how far it came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--pace", type=float, action="append")
    parser.add_argument("--refits", type=int, default=5)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    args = parser.parse_args()
    from tests.checkpoints import tokenizer_json
    from tests.gpu.ipc_h200 import shapes_only

    out: dict[str, Any] = {"ours": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = shapes_only(Path(folder), "7b")
        (path / "tokenizer.json").write_text(tokenizer_json())
        try:
            for pace in args.pace or [12.0]:
                out["ours"][f"{pace:g}"] = asyncio.run(ours(path, pace, args.refits, args.gpu_memory))
                args.out.write_text(json.dumps(out, indent=1))
            if args.peer is not None:
                out["peer"] = peer(args.peer, path)
            out["compared"] = compared(out)
        except BaseException:
            out["broken"] = traceback.format_exc()
            raise
        finally:
            args.out.write_text(json.dumps(out, indent=1))
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
