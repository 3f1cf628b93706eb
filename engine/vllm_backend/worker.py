"""Pitstop inside vLLM's workers. vLLM adds `PitstopWorker` to its worker class, by name, in every rank's process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from socket import gethostname
from time import perf_counter
from typing import Any

import msgspec

from pitstop.engine.errors import (
    ErrorRecord,
    LocalError,
    PitstopError,
    ProtocolViolation,
    UnsupportedPolicy,
    WorkerFailed,
)
from pitstop.engine.rundir import note_file
from pitstop.engine.vllm_backend.config import SOCKETS
from pitstop.engine.vllm_backend.drafter import with_drafter
from pitstop.engine.vllm_backend.fingerprint import Reading, fingerprint, readable
from pitstop.engine.vllm_backend.host import of_a_run
from pitstop.engine.vllm_backend.loading import fill_drafter, learn, loading, ways
from pitstop.engine.vllm_backend.sink import LoadingSink
from pitstop.engine.vllm_backend.watch import start_watch
from pitstop.engine.worker_ports import Receiver, Ticket, WorkerLayout, WorkerOp, WorkerReply

_log = logging.getLogger(__name__)

_CHUNK_SECONDS = 5.0
"""How long the reading of one chunk may take. It is milliseconds."""

_CLOSING_SECONDS = 0.5
"""How long a worker waits, in all, for memory that is being given back before it says what is free: milliseconds."""

# A process that was forked has unpacked nothing; see `Carried`.
if multiprocessing.parent_process() is not None:
    start_watch()


def receiver_class(name: str) -> Callable[[Ticket], Receiver]:
    """Resolve `module:Class` inside Pitstop's packages or among the entry points of the group `pitstop.receivers`.

    Raises:
        LocalError: it is in neither, or does not exist.
    """
    module, _, attribute = name.partition(":")
    # Looking through all that is installed takes milliseconds: not for our own, between two steps of a model.
    if not module.startswith("pitstop.") and name not in _declared():
        raise LocalError(f"{name} is neither Pitstop's nor a declared entry point in the group pitstop.receivers")
    try:
        found: Callable[[Ticket], Receiver] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise LocalError(f"there is no receiver {name}: {error}") from error
    return found


@cache
def _declared() -> frozenset[str]:
    return frozenset(point.value for point in entry_points(group="pitstop.receivers"))


class Landing:
    """One refit on its way into this worker: a sink, and a receiver that fills it from a thread."""

    def __init__(self, ticket: Ticket, sink: LoadingSink) -> None:
        self.sink = sink
        self._receiver = receiver_class(ticket.receiver)(ticket)
        self._thread = threading.Thread(target=self._receive, daemon=True, name=f"pitstop-receive-{ticket.refit_id}")
        self._thread.start()

    def _receive(self) -> None:
        try:
            self._receiver.run(self.sink)
        except Exception:  # noqa: BLE001
            # The receiver reports what fails on its own back-channel; this is what it could not report.
            _log.exception("a receiver failed without reporting it")

    def undo(self) -> None:
        """Receive no more, and make a half-loaded model runnable again."""
        self._receiver.abort()
        self.sink.undo()

    def release(self) -> threading.Thread:
        """Drop what landed and unmap it, also while it is still landing; return what gives the memory back."""
        self._receiver.abort()
        self.sink.release()
        # Aside: it waits for the thread, says so to the engine, and gives memory back, while the model may run.
        closing = threading.Thread(target=self._close, daemon=True, name="pitstop-close")
        closing.start()
        return closing

    def _close(self) -> None:
        self._thread.join()
        try:
            self._receiver.close()
        except Exception:  # noqa: BLE001
            _log.exception("a receiver did not close")


class WorkerSide:
    """What one worker rank knows of its refits."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._landings: dict[str, Landing] = {}
        self._busy = threading.Lock()
        self._reading: Reading | None = None
        self._closing: list[threading.Thread] = []
        extra = worker.vllm_config.additional_config
        ours = extra.get("pitstop", {}) if isinstance(extra, dict) else {}
        self._tied: dict[str, str] = ours.get("tied", {})
        _note_rendezvous(str(getattr(worker, "distributed_init_method", "")))
        if ours.get("receivers"):
            warm = (ours["receivers"], str(worker.device))
            threading.Thread(target=_warm, args=warm, daemon=True, name="pitstop-warm").start()

    def answer(self, sent: bytes) -> bytes:
        """Do what was asked for. Errors are part of the answer: vLLM would lose their types."""
        started = perf_counter()
        reply, op = WorkerReply(self._worker.rank), WorkerOp("describe")
        try:
            op = msgspec.msgpack.decode(sent, type=WorkerOp)
            reply = getattr(self, op.verb)(op, reply)
        except Exception as error:  # noqa: BLE001
            reply = replace(reply, error=_record(error, op, self._worker.rank))
        landing = self._landings.get(op.refit_id)
        touched = landing is not None and landing.sink.touched
        return msgspec.msgpack.encode(replace(reply, touched=touched, seconds=perf_counter() - started))

    def describe(self, _: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Say where this rank is. Replica and incarnation are the backend's to add."""
        until = perf_counter() + _CLOSING_SECONDS
        for thread in self._closing:
            # What is about to be free is counted as free, or the next version would find no room.
            thread.join(max(0.0, until - perf_counter()))
        world, device = self._worker.vllm_config.parallel_config.world_size, self._worker.device
        layout = WorkerLayout(
            "", 0, self._worker.rank, world, os.getpid(), str(device), *_memory(device), _node(device), gethostname()
        )
        return replace(reply, layout=layout)

    def learn(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Watch the model's loader. That there is no plan then is no error: versions are loaded without."""
        learn(self._worker, op.tensors)
        return reply

    def ways(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Say how the next version's tensors will be loaded."""
        return replace(reply, way_of=ways(self._worker, op.tensors))

    def receive(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Start the receiver of this rank's ticket."""
        mine = [ticket for ticket in op.tickets if ticket.rank == self._worker.rank]
        if len(mine) != 1:
            raise ProtocolViolation(f"{len(mine)} tickets for rank {self._worker.rank}, not one")
        if op.refit_id in self._landings:
            raise ProtocolViolation(f"refit {op.refit_id} is already being received")
        self._cut_short()
        sink = LoadingSink(mine[0], loading(self._worker), self._tied, self._busy)
        self._landings[op.refit_id] = Landing(mine[0], sink)
        return reply

    def _landing(self, op: WorkerOp) -> Landing:
        try:
            return self._landings[op.refit_id]
        except KeyError:
            raise ProtocolViolation(f"nothing was received for refit {op.refit_id}") from None

    def apply(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Put what landed into the live parameters."""
        self._cut_short()
        self._landing(op).sink.apply()
        return reply

    def finalize(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Do the post-load work."""
        sink = self._landing(op).sink
        sink.finalize()
        return replace(reply, ways=sink.ways)

    def undo(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Make a half-loaded model runnable again. Nothing to do if nothing was received."""
        if (landing := self._landings.get(op.refit_id)) is not None:
            landing.undo()
        return reply

    def fingerprint(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Say what the live models hold: now, or as soon as it has been read beside the engine's steps."""
        models = with_drafter(self._worker)
        if not op.refit_id:
            return replace(reply, fingerprint=fingerprint(models), seen=readable(models)[1])
        if self._reading is None or self._reading.name != op.refit_id:
            self._cut_short()
            balanced = bool(getattr(self._worker.vllm_config.parallel_config, "enable_eplb", False))
            self._reading = Reading(op.refit_id, models, self._worker.device, balanced=balanced)
            return reply
        return self._reading.answer(reply)

    def drafter(self, _: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Load a frozen drafter from its checkpoint: its memory holds nothing yet, or nothing any more."""
        self._cut_short()
        with self._busy:
            fill_drafter(self._worker)
        return reply

    def interrupt(self, _: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Read nothing any more."""
        self._cut_short()
        if self._reading is not None:
            self._reading.ended(_CHUNK_SECONDS)
        return reply

    def _cut_short(self) -> None:
        if self._reading is not None:
            self._reading.interrupt()

    def start_profile(self, _: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Have vLLM's profiler record."""
        return self._profile(reply, begins=True)

    def stop_profile(self, _: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Have it write what it has."""
        return self._profile(reply, begins=False)

    def _profile(self, reply: WorkerReply, *, begins: bool) -> WorkerReply:
        config = getattr(self._worker.vllm_config, "profiler_config", None)
        if getattr(config, "profiler", None) is None:
            raise UnsupportedPolicy(
                "this engine has no profiler: launch it with engine_args={'profiler_config': {'profiler': 'torch', "
                "'torch_profiler_dir': ...}}"
            )
        self._worker.profile(is_start=begins)
        return reply

    def release(self, op: WorkerOp, reply: WorkerReply) -> WorkerReply:
        """Drop what landed. Idempotent."""
        if (landing := self._landings.pop(op.refit_id, None)) is not None:
            self._closing = [*(thread for thread in self._closing if thread.is_alive()), landing.release()]
        return reply


def _note_rendezvous(where: str) -> None:
    """Have the file through which ranks have found each other removed when they are gone: torch leaves it."""
    folder = os.environ.get(SOCKETS, "")
    if where.startswith("file://") and of_a_run(folder):
        with contextlib.suppress(OSError):
            note_file(Path(folder), where.removeprefix("file://"))


def _warm(receivers: list[str], device: str) -> None:
    """Have receivers do what would take the first refit long."""
    for name in receivers:
        try:
            prepare = getattr(receiver_class(name), "prepare", None)
            if prepare is not None:
                prepare(device)
        except Exception:  # noqa: BLE001 - the first refit will say what is wrong
            _log.exception("%s could not be prepared", name)


class PitstopWorker:
    """The worker extension. Its names start with `pitstop_`: vLLM refuses one that its worker class has."""

    def pitstop_call(self, op: bytes) -> bytes:
        """Answer one `WorkerOp`. Called on the worker's main thread, between engine steps. Never raises."""
        start_watch()
        side = self.__dict__.get("pitstop_side") or WorkerSide(self)
        self.__dict__["pitstop_side"] = side
        return side.answer(op)


def _memory(device: Any) -> tuple[str, int]:
    """Say what a GPU is called by every process that sees it, and how much of its memory is free."""
    if device.type != "cuda":
        return "", 0
    import torch

    return f"cuda:{torch.cuda.get_device_properties(device).uuid}", torch.cuda.mem_get_info(device)[0]


def _node(device: Any, root: str = "/sys/bus/pci/devices") -> int | None:
    """Say which NUMA node a GPU is at, where torch and the kernel know."""
    if device.type != "cuda":
        return None
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int(Path(root, bus, "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _record(error: Exception, op: WorkerOp, rank: int) -> ErrorRecord:
    text = "".join(traceback.format_exception(error))
    # Its frames refer to tensors in the sender's memory, which is about to go.
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, PitstopError):
        record = error.record()
    else:
        kind = type(error).__name__
        record = WorkerFailed(
            f"rank {rank} failed to {op.verb}: {kind}: {error}", rank=rank, operation=op.verb, kind=kind
        ).record()
    return replace(record, traceback=text)
