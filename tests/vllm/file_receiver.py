"""A receiver without a transport: maps a file privately, hands it to the sink, and says what happened on a socket.

In place it hands tensors over one group after the other.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import random
import socket
import threading
import time
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pitstop.engine.worker_ports import Bucket, Placed, Ticket, WeightSink

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.engine.worker_ports import TensorSpec


def _tensor(mapping: mmap.mmap, placed: Placed) -> Tensor:
    import torch

    dtype, count = getattr(torch, placed.spec.dtype), prod(placed.spec.shape)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=placed.offset).view(placed.spec.shape)


def addresses(sink: Any) -> str:
    """Sum up where the live parameters are."""
    loading = sink._loading
    model = loading.live._model if hasattr(loading, "live") else loading.model
    where = sorted((name, value.data_ptr(), value.numel()) for name, value in model.named_parameters())
    return hashlib.sha256(repr(where).encode()).hexdigest()


def drafted() -> str:
    """Sum up what the layers of this process's drafter make, its packed copies and what it shares included."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    gc.unfreeze()  # vLLM hides what it has made from the collector
    proposers = [thing for thing in gc.get_objects() if isinstance(thing, SpecDecodeBaseProposer)]
    model: Any = proposers[0].model
    found = []
    with torch.inference_mode():
        for name, layer in model.named_modules(remove_duplicate=False):
            chance = torch.Generator().manual_seed(0)
            if isinstance(layer, VocabParallelEmbedding):
                inputs = torch.randn(3, layer.embedding_dim, generator=chance)
            elif isinstance(layer, LinearBase) and layer.quant_method is not None:
                inputs = torch.randn(3, getattr(layer, "input_size_per_partition", layer.input_size), generator=chance)
            else:
                continue
            if type(layer) is VocabParallelEmbedding:
                found.append((name, layer.weight.flatten().tolist()))  # type: ignore[operator]
            else:
                applied = layer.quant_method.apply(layer, inputs)
                found.append((name, applied.flatten().tolist()))
    return hashlib.sha256(repr(found).encode()).hexdigest()


class FileReceiver:
    """Its tensors alias the mapping. `close` spoils the mapping first, then unmaps it, which fails if one is left."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._aborted = threading.Event()
        self._mapping: mmap.mmap | None = None

    def run(self, sink: WeightSink) -> None:
        if self._ticket.slots:
            self._say("attached")
            while not Path(self._ticket.buffer).exists() and not self._aborted.wait(0.005):
                pass
        with Path(self._ticket.buffer).open("rb") as file:
            mapping = self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = [(placed.spec, _tensor(mapping, placed)) for placed in self._ticket.tensors]
        if self._ticket.token == "addresses":
            self._say(addresses(sink))
            return
        if self._ticket.token == "drafted":
            try:
                self._say(drafted())
            except Exception as error:  # noqa: BLE001
                self._say(f"{type(error).__name__}: {error}"[:200])
            return
        if self._ticket.token == "mute":
            self._aborted.wait()
            self._say("aborted")
            return
        if self._ticket.in_place:
            self._in_place(sink, tensors)
            return
        sink.landed(Bucket(self._ticket.refit_id, tensors))
        self._say("landed")

    def _in_place(self, sink: WeightSink, tensors: list[tuple[TensorSpec, Tensor]]) -> None:
        """Hand over shuffled groups. The token says how many, in which order, and after how many to stop.

        What has a place is put there first, as a ring's receiver does it.
        """
        count, seed, stop = (int(number) for number in self._ticket.token.split())
        random.Random(seed).shuffle(tensors)
        try:
            live = sink.places()
            for n in range(count):
                if n == stop:
                    self._say("half way")
                    self._aborted.wait()
                # Private and short-lived, as a transport's are: what is allocated next may well lie at their addresses.
                group = [(spec, _put(sink, live.get(spec.name), tensor)) for spec, tensor in tensors[n::count]]
                sink.landed(Bucket(self._ticket.refit_id, group))
        except Exception as error:  # noqa: BLE001
            self._say(f"{type(error).__name__}: {error}"[:200])
        else:
            self._say("aborted" if self._aborted.is_set() else "landed")

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        if self._mapping is None:
            return
        self._mapping[:] = b"\xff" * len(self._mapping)
        try:
            self._mapping.close()
        except BufferError:
            self._say("still referred to")
        else:
            self._say("closed")

    def _say(self, what: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(f"{self._ticket.rank} {what}".encode(), self._ticket.address)


def _put(sink: WeightSink, place: Tensor | None, tensor: Tensor) -> Tensor:
    if place is None:
        return tensor.clone()
    assert (place.shape, place.dtype, place.is_contiguous()) == (tensor.shape, tensor.dtype, True)
    while not sink.hold():
        time.sleep(0.001)
    try:
        place.copy_(tensor)
        return place
    finally:
        sink.let_go()
