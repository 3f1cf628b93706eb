"""The `Backend` port on vLLM: one replica's engine, from its start to its end, as often as it is started."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import msgspec

from pitstop.engine.counters import Counters, flatten
from pitstop.engine.errors import EngineClosed, PitstopError, WorkerFailed, from_record
from pitstop.engine.ports import Booted
from pitstop.engine.refit import Policy
from pitstop.engine.request import Adapter, Request
from pitstop.engine.vllm_backend.adapters import load, unload, unload_all
from pitstop.engine.vllm_backend.boot import Abandoned, Boot, Settings, Started, StartMethod, hang_up, start_engine
from pitstop.engine.vllm_backend.config import Seat, bound
from pitstop.engine.vllm_backend.draft_inventory import Choice, Draft
from pitstop.engine.vllm_backend.host import bind, numa_cpus
from pitstop.engine.vllm_backend.incarnation import Incarnation
from pitstop.engine.vllm_backend.leg import VllmLeg
from pitstop.engine.worker_ports import Inventory, WorkerLayout, WorkerOp, WorkerReply

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"


class VllmBackend:
    """A vLLM engine in processes of its own.

    Args:
        model: folder or hub id of the checkpoint.
        engine_args: vLLM's engine arguments, beyond what Pitstop sets itself (`arguments.OURS`).
        weight_version: the version that the checkpoint holds.
        start_method: "spawn", or "fork" in tests.
        stat_loggers: vLLM stat logger factories.
        drafter: "trained": refits bring its tensors. "frozen": it keeps those of its checkpoint. By default a drafter
            that is a part of the target's checkpoint (MTP) is trained, and one with its own (Eagle3) is not.
        seat: which replica of how many this is, for GPUs and caches; by default the only one.
    """

    def __init__(
        self,
        model: str,
        *,
        engine_args: Mapping[str, Any] | None = None,
        weight_version: int = 0,
        start_method: StartMethod = "spawn",
        stat_loggers: Sequence[Any] = (),
        receivers: Sequence[str] = (),
        drafter: Choice | None = None,
        seat: Seat | None = None,
    ) -> None:
        self._settings = Settings(
            str(model),
            dict(engine_args or {}),
            start_method,
            tuple(stat_loggers),
            tuple(receivers),
            drafter,
            seat or Seat(),
        )
        self._weight_version = weight_version
        self._boot: Boot[Started] | None = None
        self._life: Incarnation | None = None
        self._replica, self._incarnation = "", 0
        self._asleep: set[str] = set()
        self._draft: Draft | None = None
        self._emptied = False

    async def start(self, replica: str, incarnation: int) -> Booted:
        """Boot an engine in a thread.

        Raises:
            EngineArgumentRejected, CheckpointUnreadable: what was asked for cannot be.
            WorkerFailed: vLLM failed to start.
        """
        self._replica, self._incarnation = replica, incarnation
        self._asleep = set()
        self._emptied = False
        settings = self._settings
        boot = self._boot = Boot(lambda boot: start_engine(settings, boot), _discard)
        try:
            started = await boot.done
        except asyncio.CancelledError:
            boot.give_up()
            raise
        except PitstopError:
            raise
        except Abandoned as error:
            raise EngineClosed(f"replica {replica} was closed while it started", replica=replica) from error
        except Exception as error:
            raise WorkerFailed(
                f"replica {replica} failed to start: {error}",
                replica=replica,
                operation="start",
                kind=type(error).__name__,
            ) from error
        finally:
            self._boot = None
        life = self._life = Incarnation(replica, started)
        try:
            return await self._booted(life, started)
        except BaseException:
            await self.close()
            raise

    async def _booted(self, life: Incarnation, started: Started) -> Booted:
        # Fetched by vLLM at the first request otherwise, by a call that never ends if the engine dies under it.
        await life.call("list its tasks", started.llm.get_supported_tasks())
        layout = await self._describe()
        await asyncio.to_thread(self._near, layout, started.pids)
        self._draft = started.draft
        if not started.proven and started.draft is not None and not started.draft.own:
            await self._fill_drafter()
        await self._learn(started.inventory)
        config = started.llm.model_config
        # A restart loads the same old checkpoint: what the fleet has moved on to is not proven by it.
        proven = started.proven and self._incarnation <= 1
        if proven:
            await self.label(self._weight_version)
        return Booted(
            self._weight_version if proven else None,
            started.inventory,
            layout,
            config.max_model_len,
            config.get_vocab_size(),
            life.pid,
        )

    async def _learn(self, inventory: Inventory) -> None:
        every = (*inventory.tensors, *(spec for group in inventory.optional for spec in group))
        replies = await self.call_workers(WorkerOp("learn", tensors=every))
        for reply in replies:
            if reply.error is not None:
                raise from_record(reply.error)

    def _near(self, layout: Sequence[WorkerLayout], pids: Sequence[int]) -> None:
        """Have the replica's processes run on CPUs near its GPUs."""
        nodes = {rank.pid: rank.numa_node for rank in layout}
        args = self._settings.engine_args
        binding = bound(nodes, pids, numa_cpus(), frozenset(os.sched_getaffinity(0)), args)
        reached = bind(binding)
        _log.debug("%s: %s", self._replica, f"bound {reached}" if reached else f"bound to no CPUs: {binding.why_not}")

    async def _describe(self) -> tuple[WorkerLayout, ...]:
        replies = await self.call_workers(WorkerOp("describe"))
        for reply in replies:
            if reply.error is not None:
                raise from_record(reply.error)
        return tuple(
            replace(reply.layout, replica=self._replica, incarnation=self._incarnation)
            for reply in replies
            if reply.layout is not None
        )

    async def _fill_drafter(self) -> None:
        """Have a frozen drafter's weights loaded: no refit brings them."""
        if self._draft is not None and not self._draft.trained:
            for reply in await self.call_workers(WorkerOp("drafter")):
                if reply.error is not None:
                    raise from_record(reply.error)

    def _alive(self) -> Incarnation:
        if self._life is None:
            raise EngineClosed(f"replica {self._replica or 'without a name'} has no engine: call start")
        return self._life

    async def submit(self, request: Request) -> VllmLeg:
        """Hand a request to the engine; return once the engine has accepted it."""
        return await self._alive().submit(request)

    async def suspend(self, policy: Policy) -> Mapping[str, int]:
        """Stop the engine between steps; return exact token counts of what it holds."""
        life = self._alive()
        clear = policy != "keep"
        if clear and life.llm.model_config.is_multimodal_model:
            await life.call("clear its multimodal cache", life.llm.renderer.clear_mm_cache_async())
        try:
            await life.call("pause", life.can.pause(clear))
        except PitstopError:
            # The scheduler stops before the caches are dropped; a refusal there leaves it stopped.
            if life.line.reason is None:
                await life.call("resume", life.llm.resume_generation())
            raise
        return await life.counts()

    async def resume(self) -> None:
        """Let the engine run."""
        life = self._alive()
        await life.call("resume", life.llm.resume_generation())

    async def reset_cache(self) -> bool:
        """Drop prefix caches. False: the engine refused, because requests hold blocks."""
        life = self._alive()
        done = bool(await life.call("reset its prefix cache", life.llm.reset_prefix_cache()))
        if life.llm.model_config.is_multimodal_model:
            await life.call("reset its multimodal cache", life.llm.reset_mm_cache())
            await life.call("reset its encoder cache", life.llm.reset_encoder_cache())
        return done

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        """Run `op` in every worker rank; one reply a rank, errors inside it."""
        life = self._alive()
        mine = [t for t in op.tickets if (t.replica, t.incarnation) == (self._replica, self._incarnation)]
        sent = msgspec.msgpack.encode(replace(op, tickets=tuple(mine)))
        answers = await life.call(
            f"run {op.verb} in its workers", life.llm.collective_rpc("pitstop_call", args=(sent,))
        )
        return [msgspec.msgpack.decode(answer, type=WorkerReply) for answer in answers]

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `ports.AdapterHost`."""
        await load(self._alive(), adapter)

    async def unload_adapter(self, adapter: Adapter) -> None:
        """See `ports.AdapterHost`."""
        await unload(self._alive(), adapter)

    async def label(self, weight_version: int) -> None:
        """Have vLLM's own outputs and spans say the version, where it can."""
        life = self._alive()
        if life.can.weight_versions:
            await life.call("label its weights", life.llm.update_weight_version(str(weight_version)))

    async def sleep(self, level: int) -> None:
        """Give memory back. The engine is suspended, and what it holds stays held."""
        life = self._alive()
        # What reads the weights in a thread would find no memory under them.
        for reply in await self.call_workers(WorkerOp("interrupt")):
            if reply.error is not None:
                raise from_record(reply.error)
        if level >= 2:
            await unload_all(life)
        await life.call("sleep", life.llm.sleep(level, mode="keep"))
        if level >= 1:
            self._asleep = {_WEIGHTS, _KV_CACHE}
            self._emptied = level >= 2

    async def wake(self, *, kv_cache: bool) -> None:
        """Take memory again. vLLM resumes by itself once all of it is there."""
        life = self._alive()
        # Only what is asleep: waking an allocation twice maps it twice.
        tags = sorted(self._asleep if kv_cache else self._asleep & {_WEIGHTS}, reverse=True)
        if tags:
            await life.call("wake", life.llm.wake_up(tags))
            self._asleep -= set(tags)
        elif kv_cache:
            await life.call("resume", life.llm.resume_generation())
        if self._emptied and _WEIGHTS not in self._asleep:
            await self._fill_drafter()
            self._emptied = False

    async def died(self) -> PitstopError:
        """Return when the engine has died."""
        return await asyncio.shield(self._alive().death)

    async def close(self) -> None:
        """End the engine and every process of it."""
        life, self._life = self._life, None
        if (boot := self._boot) is not None:
            boot.give_up()
            await _through(asyncio.wait([boot.done], timeout=10))
        if life is not None:
            try:
                await _through(asyncio.to_thread(life.end()))
            finally:
                life.forget()
                await _through(asyncio.to_thread(life.sweep))

    def output_at(self) -> float:
        """Return when the engine's last tokens were seen."""
        return 0.0 if self._life is None else self._life.output_at

    async def output_after(self, moment: float) -> float:
        """Wait for the first tokens seen after `moment`."""
        return await self._alive().output_after(moment)

    async def counters(self) -> Counters:
        """Return what vLLM has counted in this incarnation, if its statistics are on."""
        statistics = self._alive().statistics
        return Counters() if statistics is None else flatten(statistics.series(), self._incarnation)

    async def drained(self) -> None:
        """Return when no leg is live in the engine."""
        await self._alive().drained()


def _discard(started: Started) -> None:
    try:
        started.llm.shutdown(timeout=0)
        hang_up(started.llm.engine_core.resources)
    finally:
        if started.folder is not None:
            started.folder.sweep()
        started.band.close()


async def _through(work: Awaitable[T]) -> T:
    """Await `work` to its end in spite of cancellation, which is raised afterwards: it must not leave processes."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.cancelled():
                    raise
                cancelled = error
            except Exception:  # noqa: BLE001
                break
    if cancelled is not None:
        raise cancelled
    return task.result()
