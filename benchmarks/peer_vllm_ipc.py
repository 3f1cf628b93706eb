"""vLLM 0.25.1's own weight transfer between two processes on one GPU (its CUDA IPC backend), under 64 live streams.

    python3 benchmarks/peer_vllm_ipc.py MODEL_DIR [--refits 5] [--gpu-memory 0.4]

The peer of `staged_refit_h200.py` where there is one GPU: vLLM's NCCL backend takes two. The trainer holds random
weights of the model's shapes and sends them as vLLM's documentation says (`trainer_send_weights`); the engine is
paused with `keep`, its cache is not cleared. Both ways of vLLM's are run: all tensors in one call, and packed into a
buffer. Prints one line a refit, seconds: of each step, in all, and without a token of any stream.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import importlib.util
import multiprocessing
import os
import pickle  # noqa: TID251 - the peer's protocol
import sys
import tempfile
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STREAMS = 64


def stand_in_for_ray() -> None:
    """Let `import ray` work where there is none: vLLM's backend imports it, for another way of sending."""
    if importlib.util.find_spec("ray") is None:
        folder = tempfile.mkdtemp(prefix="peer-")
        (Path(folder) / "ray.py").write_text("")
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])


def train(pipe: Connection, model: str) -> None:
    """Send the weights as often, and in the way, as the other end says."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # Of the version that it is written for, which is not the newest.
    ipc_engine: Any = importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    weights = [
        (name, torch.empty(p.shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02))
        for name, p in made.named_parameters()
    ]

    def deliver(info: Any) -> None:
        fields = asdict(info)
        handles = fields.pop("ipc_handles")
        fields["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        pipe.send(fields)
        pipe.recv()

    pipe.send(sum(tensor.nbytes for _, tensor in weights))
    while (packed := pipe.recv()) is not None:
        args = ipc_engine.IPCTrainerSendWeightsArgs(
            send_mode=deliver, packed=packed,
            packed_buffer_size_bytes=max(1 << 30, *(tensor.nbytes for _, tensor in weights)),
        )  # fmt: skip
        ipc_engine.IPCWeightTransferEngine.trainer_send_weights(iter(weights), args)
        torch.cuda.synchronize()
        pipe.send(None)


async def main(model: str, refits: int, gpu_memory: float) -> None:
    """Start both, and refit one by the other."""
    from vllm import SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    trainer = context.Process(target=train, args=(theirs, model), daemon=True)
    trainer.start()
    theirs.close()  # or its death would not be heard
    sys.stdout.write(f"bytes {await asyncio.to_thread(pipe.recv)}\n")
    asked: dict[str, Any] = {
        "model": model, "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048, "dtype": "bfloat16",
        "gpu_memory_utilization": gpu_memory, "max_num_seqs": 128,
        "weight_transfer_config": WeightTransferConfig(backend="ipc"),
        "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64]},
    }  # fmt: skip
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**asked))
    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    stamps: list[float] = []
    tokens = 0
    stop = False

    async def stream(n: int) -> None:
        nonlocal tokens
        turn = 0
        while not stop:
            # They end at different times, so that their rate is steady.
            sampling = SamplingParams(
                max_tokens=800 if turn else 800 * (n + 1) // STREAMS, temperature=0.0, ignore_eos=True,
                detokenize=False, logprobs=0, output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            turn += 1
            prompt: Any = {"prompt_token_ids": [5, 6, 7, n % 400] * 10}
            async for output in engine.generate(prompt, sampling, request_id=f"{n}-{turn}"):
                stamps.append(time.time())
                tokens += len(output.outputs[0].token_ids)
                if stop:
                    break

    streams = [asyncio.create_task(stream(n)) for n in range(STREAMS)]
    await asyncio.sleep(6)
    before, began = tokens, time.time()
    await asyncio.sleep(3)
    sys.stdout.write(f"steady tok/s {(tokens - before) / (time.time() - began):.1f}\n")
    for packed in [False] * (refits + 1) + [True] * (refits + 1):
        at = [time.time()]
        await engine.pause_generation(mode="keep", clear_cache=False)
        at.append(time.time())
        await engine.start_weight_update()
        at.append(time.time())
        pipe.send(packed)
        while (fields := await asyncio.to_thread(pipe.recv)) is not None:
            await engine.update_weights(WeightTransferUpdateRequest(update_info=fields))
            pipe.send("loaded")
        at.append(time.time())
        await engine.finish_weight_update()
        at.append(time.time())
        await engine.resume_generation()
        at.append(time.time())
        await asyncio.sleep(1.5)
        last = max(stamp for stamp in stamps if stamp <= at[4])
        first = min((stamp for stamp in stamps if stamp > at[4]), default=float("nan"))
        steps = " ".join(
            f"{name} {end - begin:.4f}"
            for name, begin, end in zip(("pause", "start", "update", "finish", "resume"), at[:-1], at[1:], strict=True)
        )
        sys.stdout.write(
            f"mode=keep clear=False packed={packed} {steps} total {at[5] - at[0]:.4f} bubble {first - last:.4f}\n"
        )
        sys.stdout.flush()
    stop = True
    pipe.send(None)
    await asyncio.wait(streams, timeout=10)
    engine.shutdown()
    trainer.join(10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--refits", type=int, default=5)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # Handles travel as pickles in vLLM's protocol.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    stand_in_for_ray()
    asyncio.run(main(args.model, args.refits, args.gpu_memory))
