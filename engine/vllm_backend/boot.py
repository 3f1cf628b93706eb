"""Starting an engine: in a thread of its own, which can be given up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pitstop.engine.errors import CheckpointUnreadable
from pitstop.engine.rundir import RunDir
from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected, engine_arguments
from pitstop.engine.vllm_backend.capabilities import refits_beneath_adapters
from pitstop.engine.vllm_backend.config import Seat, defaults, environment
from pitstop.engine.vllm_backend.counters import Statistics
from pitstop.engine.vllm_backend.draft_inventory import Choice, Draft, draft_of, layers_of, with_drafter
from pitstop.engine.vllm_backend.host import Band, changed, look, sockets
from pitstop.engine.vllm_backend.inventory import from_headers, read_config
from pitstop.engine.vllm_backend.kv_scales import optional_scales
from pitstop.engine.vllm_backend.meta_model import from_meta_model
from pitstop.engine.vllm_backend.processes import children_of_thread, descendants, hold, kill, segments
from pitstop.engine.vllm_backend.watch import FRONTEND
from pitstop.engine.worker_ports import Inventory

T = TypeVar("T")

StartMethod = Literal["spawn", "fork"]
_SOCKETS = ("output_socket", "input_socket", "first_req_send_socket", "first_req_rcv_socket", "stats_update_socket")
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
    drafter: Choice | None = None
    seat: Seat = field(default_factory=Seat)


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that is up, and what its checkpoint is made of.

    `proven`: the weights came from that checkpoint. `pids`: its processes, the core first. `shared`: the shared memory
    between them, which nobody unlinks when they are killed. `band`: the ports it may use, held as long as it lives.
    `statistics` is None if it keeps none, `draft` if it has no drafter with weights.
    """

    llm: Any
    inventory: Inventory
    proven: bool
    pids: tuple[int, ...]
    shared: frozenset[str]
    band: Band
    folder: RunDir | None = None
    statistics: Statistics | None = None
    draft: Draft | None = None


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
            _give_back(error)
            return
        if self._given_up.is_set():
            try:
                self._discard(result)
            finally:
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


def _give_back(error: BaseException) -> None:
    """Close what an engine had opened when its start failed: vLLM leaves its context to the garbage collector."""
    with contextlib.suppress(Exception):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            resources = getattr(frame.f_locals.get("self"), "resources", None)
            if hasattr(resources, "ctx"):
                hang_up(resources)


def hang_up(resources: Any) -> None:
    """Close a client's sockets and its context, which vLLM leaves to the garbage collector."""
    for name in _SOCKETS:
        if (socket := getattr(resources, name, None)) is not None and not socket.closed:
            socket.close(linger=0)
    resources.ctx.destroy(linger=0)


def start_engine(settings: Settings, boot: Boot[Started]) -> Started:
    """Read the inventory and start an engine. Blocks for as long as vLLM takes."""
    local = Path(settings.model) if Path(settings.model).is_dir() else None
    dummy = settings.engine_args.get("load_format") == "dummy"
    # Before anything is started: a checkpoint that cannot be read is found in milliseconds.
    draft = draft_of(settings.model, settings.engine_args, settings.drafter)
    inventory = None
    if local is not None:
        draft = _located(draft, local, settings)
        inventory = _inventory(local, settings, draft, dummy=dummy)
    from vllm.engine.arg_utils import AsyncEngineArgs

    boot.check()
    if settings.engine_args.get("enable_lora") and not refits_beneath_adapters():
        raise EngineArgumentRejected(
            "the installed vLLM cannot load weights into layers that run adapters, so that every refit would fail: "
            "leave enable_lora out and publish models with their adapters merged in",
            argument="enable_lora",
        )
    known = [item.name for item in fields(AsyncEngineArgs)]
    carried: dict[str, Any] = {"receivers": list(settings.receivers)}
    arguments = engine_arguments(settings.model, defaults(settings.engine_args), known, carried)
    if inventory is None:
        local = _download(settings.model, settings, dummy=dummy)
        draft = _located(draft, local, settings)
        inventory = _inventory(local, settings, draft, dummy=dummy)
    ours = arguments["additional_config"]["pitstop"]
    ours["tied"] = dict(inventory.tied)
    if draft is not None:
        ours["drafter"] = asdict(draft)
        if dummy and draft.own:
            # What it has of its own, and what it shares with the target, vLLM learns from its checkpoint.
            asked = arguments["speculative_config"]
            arguments["speculative_config"] = {"draft_load_config": {"load_format": "auto"}, **asked}
    boot.check()
    counts = settings.stat_loggers or not arguments["disable_log_stats"]
    statistics = Statistics() if counts else None
    with _one_at_a_time:
        # Another engine of this process may have put its own environment in place for a fork.
        host = look()
    band = Band(host)
    try:
        ours["environment"] = environment(settings.seat, arguments, host, band.first)
        with sockets() as folder:
            llm = _construct(arguments, settings, boot, statistics)
    except BaseException:
        band.close()
        raise
    core: int = llm.engine_core.resources.engine_manager.processes[0].pid
    pids = (core, *descendants(core))
    return Started(llm, inventory, not dummy, pids, frozenset(segments(pids)), band, folder, statistics, draft)


def _inventory(folder: Path, settings: Settings, draft: Draft | None, *, dummy: bool) -> Inventory:
    args = settings.engine_args
    trust = bool(args.get("trust_remote_code"))
    found = from_meta_model(folder, trust_remote_code=trust) if dummy else from_headers(folder)
    cache = str(args.get("kv_cache_dtype", "auto"))
    found = replace(found, optional=optional_scales(found.tensors, read_config(folder), cache))
    return with_drafter(found, folder, draft)


def _located(draft: Draft | None, target: Path, settings: Settings) -> Draft | None:
    """Say in which folder a drafter's tensors are, and behind which layer of the target."""
    if draft is None or (draft.own and Path(draft.folder).is_dir()):
        return draft
    if not draft.own:
        return replace(draft, folder=str(target), layers=layers_of(target))
    return replace(draft, folder=str(_download(draft.folder, settings, dummy=False)))


def _download(model: str, settings: Settings, *, dummy: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.model", "*.txt"] if dummy else ["*.json", "*.model", "*.txt", "*.safetensors"]
    try:
        return Path(
            snapshot_download(
                model,
                revision=settings.engine_args.get("revision") if model == settings.model else None,
                cache_dir=settings.engine_args.get("download_dir"),
                allow_patterns=wanted,
            )
        )
    except Exception as error:
        raise CheckpointUnreadable(f"{model} is no folder and cannot be downloaded: {error}") from error


def _construct(
    arguments: dict[str, Any], settings: Settings, boot: Boot[Started], statistics: Statistics | None
) -> Any:
    """Make the `AsyncLLM`.

    "spawn" is how vLLM starts engines. "fork" takes 0.5 s instead of 12 s, since the core inherits what this process
    has imported and works without a worker process; it is sound only where nothing else runs in threads.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    os.environ[FRONTEND] = str(os.getpid())
    if settings.start_method == "spawn":
        return _make(AsyncEngineArgs(**arguments), settings, boot, statistics)
    if arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1) == 1:
        # As a class path: vLLM's CPU platform replaces the executor's short name by the one with worker processes.
        arguments.setdefault("distributed_executor_backend", IN_CORE)
    from pitstop.engine.vllm_backend.executor import without_dunders

    without_dunders()
    # A process that is forked unpacks nothing, and inherits this; see `Carried`.
    ours = arguments["additional_config"]["pitstop"]["environment"]
    with _one_at_a_time, changed({**ours, "VLLM_WORKER_MULTIPROC_METHOD": "fork"}):
        return _make(AsyncEngineArgs(**arguments), settings, boot, statistics, fork=True)


def _make(
    asked: Any, settings: Settings, boot: Boot[Started], statistics: Statistics | None, *, fork: bool = False
) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    with _one_at_a_time:
        config = asked.create_engine_config()
    if fork:
        # Only now: the CPU platform sets it to "spawn" while it makes the configuration.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    boot.check()
    ours = [] if statistics is None else [statistics.logger]
    return AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=not asked.disable_log_stats,
        log_requests=False,
        stat_loggers=[*ours, *settings.stat_loggers] or None,
    )
