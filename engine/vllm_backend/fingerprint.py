"""What the live model's memory holds, as one number a tensor: to compare two engines, or one engine with itself.

It is about the engine's own layout (fused, sharded, converted), so a trainer cannot predict it. Two engines of one
configuration that hold the same weights agree; a weight that drifted or was never written shows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pitstop.engine.errors import DeadlineExceeded, ReadingCutShort
from pitstop.engine.vllm_backend.layers import packs
from pitstop.engine.vllm_backend.sums import word_sums
from pitstop.engine.worker_ports import Seen, WorkerReply

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from pitstop.engine.vllm_backend.drafter import DraftModel, WithDrafter

    Readable = Module | DraftModel | WithDrafter

_CHUNK: Final = 1 << 20  # words of eight bytes: bounds the memory that indices and products take, and a step's delay
_REST: Final = 9  # times as long as it has read a thread lets a GPU, and Python's lock, to the engine's steps
_LONGEST: Final = 0.02  # seconds, or long steps, behind which its reads queue, would make it late
_SCALES: Final = frozenset({"_k_scale", "_v_scale", "_q_scale", "_prob_scale"})


def fingerprint(model: Readable) -> dict[str, str]:
    """Return a 64-bit number for each parameter and buffer, computed where it lies."""
    named, _ = readable(model)
    return {name: _written(sum(_parts(tensor))) for name, tensor in named.items()}


def readable(model: Readable, *, balanced: bool = False) -> tuple[dict[str, Tensor], Seen]:
    """Return the tensors of a model that must stay as they are while it serves, and what those leave out.

    `balanced`: the engine moves experts between its ranks as it serves.
    """
    left_out: dict[str, str] = {}
    blind: list[str] = []
    for path, layer in model.named_modules():
        own = [(f"{path}.{name}" if path else name, name) for name in (*layer._parameters, *layer._buffers)]
        if getattr(layer, "calculate_kv_scales", False):
            left_out |= {full: "computed from the first requests" for full, name in own if name in _SCALES}
        if balanced:
            left_out |= {full: "moved between ranks by expert load balancing" for full, _ in own if ".experts." in full}
        blind += [full for full, name in own if _packed(layer, name)]
    named = {
        name: tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name not in left_out
    }
    nbytes = sum(tensor.nbytes for name, tensor in named.items() if name not in blind)
    return named, Seen(nbytes, tuple(blind), left_out)


def _packed(layer: Any, name: str) -> bool:
    """Say whether a layer computes with a packed copy of a parameter, which cannot be read."""
    if name != "weight" or layer._parameters.get(name) is None:
        return False
    # Linear layers on the CPU: what computes is a closure over the copy. An embedding that is looked up has one too.
    return not layer.weight.numel() or (packs(layer) and type(layer).__name__ != "VocabParallelEmbedding")


def _written(number: int) -> str:
    return f"{number & (2**64 - 1):016x}"


def _parts(tensor: Tensor) -> Iterator[int]:
    """Yield what each chunk adds to a tensor's number."""
    # A GPU has the bandwidth for more at once, and each launch takes Python's lock from the engine's steps.
    for part in word_sums(_flat(tensor), _CHUNK * (4 if tensor.is_cuda else 1)):
        yield int(part.item())


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in the order in which they lie in memory, without a copy where they have no gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return tensor.contiguous().view(-1)
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


class Reading:
    """A fingerprint that is taken in a thread beside the engine's steps, in some tenth of a GPU's time (half a CPU's).

    Made on the worker's main thread; from then on it reads the tensors that the model had at that moment.
    """

    def __init__(self, name: str, model: Readable, device: Any, *, balanced: bool = False) -> None:
        self.name = name
        named, self._seen = readable(model, balanced=balanced)
        self._device = device
        self._stop = threading.Event()
        self._found: dict[str, str] | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(named,), daemon=True, name="pitstop-read")
        self._thread.start()

    def interrupt(self) -> None:
        """End it soon. Idempotent."""
        self._stop.set()

    def ended(self, seconds: float) -> None:
        """Return when nothing is read any more.

        Raises:
            DeadlineExceeded: a chunk takes longer than that.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"live weights were still being read after {seconds:g} s",
                phase="verify",
                peer="device",
                seconds=seconds,
            )

    def answer(self, reply: WorkerReply) -> WorkerReply:
        """Add what was found, if it was.

        Raises:
            ReadingCutShort: it was interrupted first.
        """
        if self._failure is not None:
            raise self._failure
        if self._found is not None:
            return replace(reply, fingerprint=self._found, seen=self._seen)
        if self._stop.is_set():
            raise ReadingCutShort(
                f"rank {reply.rank}: a refit or a sleep came while its weights were read", rank=reply.rank
            )
        return reply

    def _run(self, named: dict[str, Tensor]) -> None:
        try:
            with _aside(self._device):
                found = {}
                for name in list(named):
                    total, tensor = 0, named.pop(name)
                    began = time.perf_counter()
                    for part in _parts(tensor):
                        total += part
                        # What the device does meanwhile is the engine's.
                        took = time.perf_counter() - began
                        if self._stop.wait(min(took * _REST, max(took, _LONGEST)) if tensor.is_cuda else took):
                            return
                        began = time.perf_counter()
                    found[name] = _written(total)
            if not self._stop.is_set():
                self._found = found
        except Exception as error:  # noqa: BLE001 - whoever asks is told
            self._failure = error


@contextlib.contextmanager
def _aside(device: Any) -> Iterator[None]:
    """Work on a stream of its own, where there are streams."""
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
