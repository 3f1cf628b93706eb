"""Trainer and engine on one GPU: refits by CUDA IPC, staged and in place, under every policy. Run as a script.

    python3 tests/gpu/ipc_h200.py OUT.json [--shape 0.5b | 7b] [--staging host]

The trainer is a process of its own that lends its ring; it also scores what the engine made: the logprobs of each
segment, teacher-forced through the weights that the segment's span names (and, under `keep`, through the cache that
the older weights left). Asserts what DESIGN guarantees, writes what it saw. Needs one GPU and vLLM; no network.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pitstop.engine import RolloutEngine, SamplingParams
from pitstop.engine.errors import PitstopError
from pitstop.engine.lifecycle import Phase
from pitstop.engine.ports import Observer
from pitstop.transports import Buffers, room
from tests.gpu.refit_h200 import SHAPES, checkpoint, greedy, prompt, same

SHAPES["7b"] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
LONG = SamplingParams(max_tokens=800, temperature=0.0, ignore_eos=True)
BEGAN = time.perf_counter()
RIGHT, WRONG = 0.1, 1.5  # mean difference of logprobs: at most under the right weights, at least under others


class Trainer:
    """Runs in the child: two sets of weights on the GPU, a publisher, and a reference model."""

    def __init__(self, address: str, folders: list[str]) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoConfig

        from pitstop.transports import Publisher

        self.torch = torch
        self.models: dict[int, Any] = {}
        self.config = AutoConfig.from_pretrained(folders[0])
        if (Path(folders[0]) / "model.safetensors").exists():
            self.weights = [load_file(f"{folder}/model.safetensors", device="cuda") for folder in folders]
        else:
            self.weights = [self.random(seed) for seed in (0, 1)]
        self.publisher = Publisher.connect(address)

    def random(self, seed: int) -> dict[str, Any]:
        made = self.torch.Generator("cuda").manual_seed(seed)
        return {
            name: self.torch.randn(p.shape, generator=made, device="cuda").mul_(0.05).bfloat16()
            for name, p in self.model(None).named_parameters()
        }

    def model(self, which: int | None) -> Any:
        from transformers import AutoModelForCausalLM

        if which not in self.models:
            with self.torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.config, dtype=self.torch.bfloat16)
            if which is None:
                return model
            with self.torch.device("cuda"):
                model.to_empty(device="cuda")
                model.model.rotary_emb = type(model.model.rotary_emb)(self.config)
            own = dict(model.named_parameters())
            for name, value in self.weights[which].items():
                own[name].data = value
            model.tie_weights()
            self.models[which] = model.eval()
        return self.models[which]

    def publish(self, which: int, version: int, options: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        handle = self.publisher.publish(self.weights[which].items(), weight_version=version, **options)
        handle.sent.wait(120)
        sent = time.perf_counter() - began
        try:
            report = handle.result(120)
        except PitstopError as error:
            return {"error": error.slug, "message": error.message}
        return {
            "outcome": report.outcome.value, "transport": report.transport, "nbytes": report.nbytes,
            "staging": report.staging, "why": report.staging_reason,
            "seconds": round(report.seconds, 4), "sent_s": round(sent, 4),
            "bubble_s": report.bubble and round(report.bubble, 4),
            **{f"{k}_s": round(v, 4) for k, v in report.phase_seconds.items()},
        }  # fmt: skip

    def score(
        self, ids: list[int], start: int, end: int, which: int, cached: tuple[int, int] | None = None
    ) -> list[float]:
        """Logprobs of ids[start:end]; `cached` says whose cache the first so many positions come from."""
        torch = self.torch
        with torch.no_grad():
            row = torch.tensor([ids], device="cuda")
            past, first = None, 0
            if cached is not None:
                other, first = cached
                past = self.model(other)(row[:, :first], use_cache=True).past_key_values
            logits = self.model(which)(row[:, first : end - 1], past_key_values=past).logits.float()
            logprobs = logits.log_softmax(-1)[0, start - 1 - first :]
            return [float(x) for x in logprobs.gather(1, row[0, start:end, None])[:, 0].cpu()]


def train(pipe: Connection, address: str, folders: list[str]) -> None:
    trainer = Trainer(address, folders)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        name, *arguments = order
        try:
            pipe.send(getattr(trainer, name)(*arguments))
        except Exception:  # noqa: BLE001 - told to the parent
            pipe.send({"crashed": traceback.format_exc()})
    trainer.publisher.close()


class Child:
    def __init__(self, address: str, folders: list[Path]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=train, args=(theirs, address, [str(f) for f in folders]), daemon=True)
        self.process.start()

    async def answer(self, seconds: float = 150) -> Any:
        if not await asyncio.to_thread(self.pipe.poll, seconds):
            raise TimeoutError("the trainer does not answer")
        found = self.pipe.recv()
        if isinstance(found, dict) and "crashed" in found:
            raise RuntimeError(found["crashed"])
        return found

    async def ask(self, *order: Any) -> Any:
        self.pipe.send(order)
        found = await self.answer()
        said(order[0], order[1:] if order[0] != "score" else "", found if order[0] != "score" else "")
        return found


def launch(
    path: Path, *, buffers: Buffers | None = None, observer: Observer | None = None, **more: Any
) -> RolloutEngine:
    return RolloutEngine.launch(
        path,
        buffers=buffers,
        observer=observer,
        engine_args={
            "skip_tokenizer_init": True, "max_model_len": 2048, "dtype": "bfloat16", "gpu_memory_utilization": 0.4,
            "max_num_seqs": 128, "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64]}, **more,
        },
    )  # fmt: skip


def said(*words: object) -> None:
    sys.stderr.write(" ".join(map(str, (f"{time.perf_counter() - BEGAN:7.1f}", *words))) + "\n")


def difference(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / max(len(one), 1)


async def checked(trainer: Child, done: Any, ids: list[int], held: dict[int, int], policy: str) -> list[list[float]]:
    """Return, a segment, how far its logprobs are from those of its version and from those of the other one."""
    seen = []
    for n, span in enumerate(done.spans):
        version, start, end = span
        if end - start < 2:
            continue
        made = list(done.logprobs[start:end])
        at, until = len(ids) + start, len(ids) + end
        whole = [*ids, *done.token_ids]
        cached = (held[done.spans[n - 1][0]], at - 1) if policy == "keep" and n else None
        right = await trainer.ask("score", whole, at, until, held[version], cached)
        wrong = await trainer.ask("score", whole, at, until, 1 - held[version])
        seen.append([round(difference(made, right), 4), round(difference(made, wrong), 4)])
    return seen


async def policies(
    engine: RolloutEngine, trainer: Child, version: int, held: dict[int, int], wanted: str
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for mode in ("staged", "in_place"):
        for policy in ("keep", "recompute", "wait", "abort"):
            version += 1
            held[version] = version % 2
            streams = [asyncio.create_task(engine.generate(prompt(n), LONG)) for n in range(64)]
            await asyncio.sleep(0.8)
            seen = await trainer.ask("publish", held[version], version, {"mode": mode, "policy": policy})
            done = await asyncio.gather(*streams)
            seen["finish"] = sorted({c.finish_reason for c in done})
            seen["spans"] = sorted({len(c.spans) for c in done})
            seen["versions"] = sorted({span[0] for c in done for span in c.spans})
            seen["segments"] = [s for n in (0, 21) for s in await checked(trainer, done[n], prompt(n), held, policy)]
            out[f"{mode}_{policy}"] = seen
            assert seen["outcome"] == "committed", seen
            assert seen["transport"] == "cuda_ipc", seen
            assert seen["staging"] == (wanted if mode == "staged" else "none"), seen
            said(mode, policy, seen["spans"], seen["finish"], seen["segments"])
    return out


async def run(shape: str, out: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        t0, t1 = checkpoint(Path(folder), shape, 0), checkpoint(Path(folder), shape, 1)
        async with launch(t1) as fresh:
            wanted = await greedy(fresh)
            truth = (await fresh.fingerprints())["replica-0"]
        said("fresh engine done")
        async with launch(t0) as engine:
            config = engine.replicas[0].backend._life.llm.vllm_config  # type: ignore[attr-defined]
            out["async_scheduling"] = bool(config.scheduler_config.async_scheduling)
            out["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
            assert out["async_scheduling"]
            assert "NONE" not in out["cudagraph_mode"]
            first = (await engine.fingerprints())["replica-0"]
            assert first != truth
            said("engine up")
            trainer = Child(engine.address, [t0, t1])
            assert await trainer.answer() == "ready"
            said("trainer up")
            version, held = 0, {0: 0}
            for mode in ("staged", "in_place", "staged", "in_place"):
                for which, right in ((1, truth), (0, first)):
                    version += 1
                    held[version] = which
                    seen = await trainer.ask("publish", which, version, {"mode": mode})
                    live = (await engine.fingerprints())["replica-0"]
                    seen["differ"] = [name for name in right if live.get(name) != right[name]][:5]
                    if which:
                        seen["tokens_equal"] = same(await greedy(engine), wanted)
                    out[f"{version}_{mode}"] = seen
                    assert seen.get("transport") == "cuda_ipc", seen
                    assert not seen["differ"]
            out["tensors"] = len(truth)
            out |= await policies(engine, trainer, version, held, out["wanted_staging"])
            version = max(held)
            out["killed"] = await killed(engine, trainer, [t0, t1], version, truth)
            for seen in (value for value in out.values() if isinstance(value, dict) and "segments" in value):
                for right, wrong in seen["segments"]:
                    assert right < RIGHT < WRONG < wrong, seen["segments"]


async def killed(
    engine: RolloutEngine, trainer: Child, folders: list[Path], version: int, truth: dict[str, str]
) -> dict[str, Any]:
    """SIGKILL the trainer in the middle: staged is clean, in place is torn, and the next trainer repairs it."""
    out: dict[str, Any] = {}
    replica = engine.replicas[0]
    for mode in ("staged", "in_place"):
        version += 1
        trainer.pipe.send(("publish", 1, version, {"mode": mode}))
        await asyncio.sleep(0.02 if mode == "staged" else 0.06)
        trainer.process.kill()
        began = time.perf_counter()
        trainer.process.join(10)
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await replica.reached(frozenset({Phase.SERVING, Phase.QUARANTINED}))
        out[mode] = {"phase": replica.phase.value, "settled_s": round(time.perf_counter() - began, 2)}
        trainer = Child(engine.address, folders)
        assert await trainer.answer() == "ready"
        version += 1
        seen = await trainer.ask("publish", 1, version, {"mode": mode})
        live = (await engine.fingerprints())["replica-0"]
        out[mode]["next"] = seen
        assert seen["outcome"] == "committed"
        assert live == truth
    trainer.pipe.send(None)
    return out


def shapes_only(folder: Path, shape: str) -> Path:
    """A checkpoint without weights, for an engine that makes its own up."""
    path = folder / shape
    path.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "use_sliding_window": False, **SHAPES[shape],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


async def big(out: dict[str, Any]) -> None:
    """7B shapes, random weights: no truth but the digests; what the phases take."""
    with tempfile.TemporaryDirectory() as folder:
        path = shapes_only(Path(folder), "7b")
        async with launch(path, load_format="dummy") as engine:
            trainer = Child(engine.address, [path, path])
            assert await trainer.answer() == "ready"
            for version, mode in enumerate(("staged", "in_place", "staged", "in_place", "staged"), 1):
                streams = []
                if version > 1:
                    streams = [asyncio.create_task(engine.generate(prompt(n), LONG)) for n in range(64)]
                    await asyncio.sleep(1.5)
                out[f"{version}_{mode}"] = await trainer.ask("publish", version % 2, version, {"mode": mode})
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
            trainer.pipe.send(None)


def recorded(work: Coroutine[Any, Any, None], path: Path, out: dict[str, Any]) -> None:
    """Do it and write what it has put into `out`, so that a run that is cut short tells how far it came."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    faulthandler.dump_traceback_later(240, repeat=True)
    try:
        asyncio.run(work)
    except BaseException:
        out["failed"] = traceback.format_exc()
        raise
    finally:
        path.write_text(json.dumps(out, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--staging", choices=("device", "host"), default="device")
    args = parser.parse_args()
    out: dict[str, Any] = {"shape": args.shape, "wanted_staging": args.staging}
    if args.staging == "host":
        room._DEVICE_HEADROOM = 1 << 60  # type: ignore[misc]
    recorded(big(out) if args.shape == "7b" else run(args.shape, out), args.out, out)


if __name__ == "__main__":
    main()
