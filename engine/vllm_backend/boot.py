"""Starting an engine: in a thread of its own, which can be given up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pitstop.engine.errors import CheckpointUnreadable
from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected, engine_arguments
from pitstop.engine.vllm_backend.capabilities import refits_beneath_adapters
from pitstop.engine.vllm_backend.inventory import from_headers
from pitstop.engine.vllm_backend.meta_model import from_meta_model
from pitstop.engine.vllm_backend.processes import children_of_thread, descendants, hold, kill, segments
from pitstop.engine.vllm_backend.watch import FRONTEND
from pitstop.engine.worker_ports import Inventory

T = TypeVar("T")

StartMethod = Literal["spawn", "fork"]
IN_CORE = "pitstop.engine.vllm_backend.executor.InCoreExecutor"

# vLLM says in the environment how processes are started, and engines of one process share it.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is started from. `start_method` "fork" is for tests: see `_construct`.

    `receivers` are what tickets may name: workers prepare them when they start.
    """

    model: str
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    start_method: StartMethod = "spawn"
    stat_loggers: Sequence[Any] = ()
    receivers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that is up, and what its checkpoint is made of.

    `proven`: the weights came from that checkpoint. `pids`: its processes, the core first. `shared`: the shared memory
    between them, which nobody unlinks when they are killed.
    """

    llm: Any
    inventory: Inventory
    proven: bool
    pids: tuple[int, ...]
    shared: frozenset[str]


class Abandoned(Exception):
    """Raised inside a boot that nobody waits for any more."""


class Boot(Generic[T]):
    """Runs `work` in a thread and can be given up: then what it started is killed, and what it made is discarded."""

    def __init__(self, work: Callable[[Boot[T]], T], discard: Callable[[T], None]) -> None:
        self._work, self._discard = work, discard
        self._loop = asyncio.get_running_loop()
        self._given_up = threading.Event()
        self.done: asyncio.Future[T] = self._loop.create_future()
        # Not a pool's: the kernel lists children by the thread that started them, and this one starts one engine only.
        self._thread = threading.Thread(target=self._run, daemon=True, name="pitstop-boot")
        self._thread.start()

    def check(self) -> None:
        """Raise `Abandoned` if the boot was given up. Called by the work before it starts processes."""
        if self._given_up.is_set():
            raise Abandoned

    def give_up(self) -> None:
        """End the boot soon. Idempotent."""
        self._given_up.set()
        for child in children_of_thread(self._thread.native_id or 0):
            for pid in (*descendants(child), child):
                if (pidfd := hold(pid)) is not None:
                    kill(pidfd)
                    os.close(pidfd)

    def _run(self) -> None:
        try:
            result = self._work(self)
        except BaseException as error:  # noqa: BLE001
            # What vLLM says of a child that was killed on purpose is of no interest.
            failure = Abandoned() if self._given_up.is_set() else error
            self._post(lambda: self._fail(failure))
            return
        if self._given_up.is_set():
            self._discard(result)
            self._post(lambda: self._fail(Abandoned()))
        elif not self._post(lambda: self._succeed(result)):
            self._discard(result)

    def _post(self, settle: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            # The loop is closed.
            return False
        return True

    def _succeed(self, result: T) -> None:
        if self.done.done():
            self._discard(result)
        else:
            self.done.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            # Whoever gave up does not look.
            self.done.exception()


def start_engine(settings: Settings, boot: Boot[Started]) -> Started:
    """Read the inventory and start an engine. Blocks for as long as vLLM takes."""
    local = Path(settings.model) if Path(settings.model).is_dir() else None
    dummy = settings.engine_args.get("load_format") == "dummy"
    # Before anything is started: a checkpoint that cannot be read is found in milliseconds.
    inventory = None if local is None else _inventory(local, settings, dummy=dummy)
    from vllm.engine.arg_utils import AsyncEngineArgs

    boot.check()
    if settings.engine_args.get("enable_lora") and not refits_beneath_adapters():
        raise EngineArgumentRejected(
            "the installed vLLM cannot load weights into layers that run adapters, so that every refit would fail: "
            "leave enable_lora out and publish models with their adapters merged in",
            argument="enable_lora",
        )
    known = [item.name for item in fields(AsyncEngineArgs)]
    tied = {} if inventory is None else inventory.tied
    arguments = engine_arguments(settings.model, settings.engine_args, known, tied)
    if inventory is None:
        inventory = _inventory(_download(settings, dummy=dummy), settings, dummy=dummy)
        arguments["additional_config"]["pitstop"]["tied"] = dict(inventory.tied)
    arguments["additional_config"]["pitstop"]["receivers"] = list(settings.receivers)
    boot.check()
    llm = _construct(arguments, settings, boot)
    core: int = llm.engine_core.resources.engine_manager.processes[0].pid
    pids = (core, *descendants(core))
    return Started(llm, inventory, not dummy, pids, frozenset(segments(pids)))


def _inventory(folder: Path, settings: Settings, *, dummy: bool) -> Inventory:
    if not dummy:
        return from_headers(folder)
    return from_meta_model(folder, trust_remote_code=bool(settings.engine_args.get("trust_remote_code")))


def _download(settings: Settings, *, dummy: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.model", "*.txt"] if dummy else ["*.json", "*.model", "*.txt", "*.safetensors"]
    try:
        return Path(
            snapshot_download(
                settings.model,
                revision=settings.engine_args.get("revision"),
                cache_dir=settings.engine_args.get("download_dir"),
                allow_patterns=wanted,
            )
        )
    except Exception as error:
        raise CheckpointUnreadable(f"{settings.model} is no folder and cannot be downloaded: {error}") from error


def _construct(arguments: dict[str, Any], settings: Settings, boot: Boot[Started]) -> Any:
    """Make the `AsyncLLM`.

    "spawn" is how vLLM starts engines. "fork" takes 0.5 s instead of 12 s, since the core inherits what this process
    has imported and works without a worker process; it is sound only where nothing else runs in threads.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    os.environ[FRONTEND] = str(os.getpid())
    if settings.start_method == "spawn":
        return _make(AsyncEngineArgs(**arguments), settings, boot)
    if arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1) == 1:
        # As a class path: vLLM's CPU platform replaces the executor's short name by the one with worker processes.
        arguments.setdefault("distributed_executor_backend", IN_CORE)
    from pitstop.engine.vllm_backend.executor import without_dunders

    without_dunders()
    with _one_at_a_time:
        before = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        try:
            return _make(AsyncEngineArgs(**arguments), settings, boot, fork=True)
        finally:
            os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
            if before is not None:
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = before


def _make(asked: Any, settings: Settings, boot: Boot[Started], *, fork: bool = False) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    with _one_at_a_time:
        config = asked.create_engine_config()
    if fork:
        # Only now: the CPU platform sets it to "spawn" while it makes the configuration.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    boot.check()
    return AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=not asked.disable_log_stats,
        log_requests=False,
        stat_loggers=list(settings.stat_loggers) or None,
    )
