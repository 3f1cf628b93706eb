"""One life of one engine: its requests, the order of its outputs, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from pitstop.engine.errors import EngineClosed, InvalidRequest, PitstopError, RemoteError, ReplicaDied
from pitstop.engine.request import Request
from pitstop.engine.vllm_backend.boot import Started, hang_up
from pitstop.engine.vllm_backend.capabilities import probe
from pitstop.engine.vllm_backend.leg import VllmLeg
from pitstop.engine.vllm_backend.line import Line, copied
from pitstop.engine.vllm_backend.processes import (
    descendants,
    ended,
    exitcode,
    hold,
    how_it_ended,
    kill,
    segments,
    unlink_unused,
)
from pitstop.engine.vllm_backend.sampling import lora_request, sampling_params

_STOP_SECONDS = 5.0
_REAP_SECONDS = 1.0


class Marker:
    """Looks like an empty batch of outputs to vLLM's output handler, which takes batches in order.

    When the handler reads it, every batch that was queued before it has been processed.
    """

    scheduler_stats = None
    weight_version = None
    timestamp = 0.0
    engine_index = 0

    def __init__(self) -> None:
        self.read = asyncio.Event()

    @property
    def outputs(self) -> list[Any]:
        """What the handler looks at first."""
        self.read.set()
        return []


class Incarnation:
    """An `AsyncLLM` from its start to its end."""

    def __init__(self, replica: str, started: Started) -> None:
        self.replica = replica
        self.llm = llm = started.llm
        self.can = probe(llm)
        self.line = Line()
        self.trims_stops = self.can.trims_stops
        self.output_at = 0.0
        speculative = getattr(llm.vllm_config, "speculative_config", None)
        self._room = (llm.model_config.max_model_len, getattr(speculative, "num_speculative_tokens", None) or 0)
        self._closing = False
        self._legs: dict[str, VllmLeg] = {}
        self._entering: set[str] = set()
        self._curious: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self.death: asyncio.Future[PitstopError] = self._loop.create_future()
        self.pid = started.pids[0]
        self._shared = started.shared
        self.statistics = started.statistics
        self._band, self._folder = started.band, started.folder
        self._pidfds = {pid: pidfd for pid in started.pids if (pidfd := hold(pid)) is not None}
        self._stamp_outputs()
        self._watch_for_the_end()

    def _stamp_outputs(self) -> None:
        process = self.llm.output_processor.process_outputs

        def stamped(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if outputs:
                self.output_at = monotonic()
            processed = process(outputs, *args, **kwargs)
            if self._curious:
                self._tell()
            return processed

        self.llm.output_processor.process_outputs = stamped

    def _tell(self) -> None:
        curious, self._curious = self._curious, []
        for waiting in curious:
            if not waiting.done():
                waiting.set_result(None)

    async def _news(self) -> None:
        if self.line.reason is not None:
            raise copied(self.line.reason)
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._curious.append(waiting)
        await waiting

    async def drained(self) -> None:
        """Return when the engine holds no request."""
        while any(leg.held for leg in self._legs.values()):
            await self._news()

    async def output_after(self, moment: float) -> float:
        """Return when the first tokens after `moment` were seen."""
        while self.output_at <= moment:
            await self._news()
        return self.output_at

    def _watch_for_the_end(self) -> None:
        # Without a request vLLM does not listen: a core that fails while idle would not be heard.
        self.llm._run_output_handler()
        self.llm.output_handler.add_done_callback(lambda _: self._look())
        if (pidfd := self._pidfds.get(self.pid)) is not None:
            self._loop.add_reader(pidfd, self._look)
        else:
            self._look()

    def _look(self, *, patient: bool = True) -> None:
        """Find out how the engine ended, which it has."""
        if self._closing:
            return
        self._unwatch()
        pidfd = self._pidfds.get(self.pid)
        if pidfd is not None and not ended([pidfd], 0):
            self._ended("its engine core failed")
            return
        code = None if pidfd is None else exitcode(pidfd)
        if code is None and (code := self._reaped()) is None and patient:
            # vLLM's own watch has reaped it in its thread, and is about to note how it ended.
            self._loop.call_later(0.01, lambda: self._look(patient=False))
        else:
            self._ended(f"its engine process {self.pid} {how_it_ended(code)}")

    def _reaped(self) -> int | None:
        code: int | None = self.llm.engine_core.resources.engine_manager.processes[0].exitcode
        return code

    def _ended(self, how: str) -> None:
        self._cut(ReplicaDied(f"replica {self.replica} died: {how}", replica=self.replica))
        if not self.death.done():
            self.death.set_result(self.lost())

    def _unwatch(self) -> None:
        if (pidfd := self._pidfds.get(self.pid)) is not None:
            self._loop.remove_reader(pidfd)

    def _cut(self, reason: PitstopError) -> None:
        self.line.cut(reason)
        for leg in self._legs.values():
            leg.fail(reason)
        self._tell()

    def lost(self) -> PitstopError:
        """Say why the engine is gone."""
        if self.line.reason is None:
            self._look(patient=False)
        assert self.line.reason is not None
        return copied(self.line.reason)

    async def submit(self, request: Request) -> VllmLeg:
        """Hand a request over; cancelling the call leaves nothing in the engine."""
        name = request.request_id
        if name in self._entering or ((other := self._legs.get(name)) is not None and other.held):
            raise InvalidRequest(f"a request named {name} is already in replica {self.replica}", request=name)
        params = sampling_params(request, *self._room)
        self._entering.add(name)
        return await self.line.call(self._enter(request, params), late=VllmLeg.abort)

    async def _enter(self, request: Request, params: Any) -> VllmLeg:
        from vllm.inputs import tokens_input

        extra: dict[str, Any] = {}
        if request.trace_headers and self.llm.observability_config.otlp_traces_endpoint is not None:
            extra["trace_headers"] = dict(request.trace_headers)
        if request.session_id is not None and "session_id" in self.can.adds:
            extra["session_id"] = request.session_id
        if request.adapter is not None:
            extra["lora_request"] = lora_request(request.adapter)
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt or None)
        try:
            # vLLM makes the name unique before it uses it as a key.
            collector = await self.llm.add_request(
                request.request_id, prompt, params, priority=request.priority, **extra
            )
        except self.can.invalid as error:
            raise InvalidRequest(f"request {request.request_id}: {error}", request=request.request_id) from error
        finally:
            self._entering.discard(request.request_id)
        # No await since the request was registered, so that its record is still there.
        leg = VllmLeg(self, request, collector, self.llm.output_processor.request_states[collector.request_id])
        self._legs[request.request_id] = leg
        if self.line.reason is not None:
            leg.fail(self.lost())
        return leg

    def holds(self, engine_id: str) -> bool:
        """Say whether the engine may still make tokens for a request."""
        return engine_id in self.llm.output_processor.request_states

    def drop(self, engine_id: str) -> None:
        """Take a request out of the engine, once."""
        if self.line.reason is None and (gone := self.llm.output_processor.abort_requests([engine_id], internal=True)):
            self.line.start(self.llm.engine_core.abort_requests_async(gone))
            self._tell()

    def left(self, leg: VllmLeg) -> None:
        """A leg has its last piece."""
        if self._legs.get(leg.request.request_id) is leg:
            del self._legs[leg.request.request_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return str(self.llm.tokenizer.decode(token_ids, skip_special_tokens=True))

    async def call(self, what: str, work: Any) -> Any:
        """Call into the engine; what it answers with an error becomes a `RemoteError`."""
        try:
            return await self.line.call(work)
        except PitstopError:
            raise
        except Exception as error:
            if self.llm.errored:
                raise self.lost() from error
            raise RemoteError(f"replica {self.replica} failed to {what}: {error}", replica=self.replica) from error

    async def counts(self) -> dict[str, int]:
        """Return how many tokens the engine has made of every request that it holds. It must be paused."""
        marker = Marker()
        # Replies overtake outputs: a reply is handed over where outputs are queued for another task.
        self.llm.engine_core.outputs_queue.put_nowait(marker)
        await self.line.call(marker.read.wait())
        return {name: leg.made for name, leg in self._legs.items() if leg.held}

    def end(self) -> Callable[[], None]:
        """Stop using the engine; return what ends its processes, to be called in a thread."""
        self._closing = True
        self._unwatch()
        self._cut(EngineClosed(f"replica {self.replica} was closed", replica=self.replica))
        # Now, or it would report the end of its processes as a failure.
        self.llm.output_handler.cancel()
        below = {pid: pidfd for pid in descendants(self.pid) if (pidfd := hold(pid)) is not None}
        pidfds = [*self._pidfds.values(), *below.values()]
        shared = self._shared | segments(below)
        cores = list(self.llm.engine_core.resources.engine_manager.processes)

        def stop() -> None:
            with contextlib.suppress(Exception):
                self.llm.shutdown(timeout=0)
            for pidfd in pidfds:
                kill(pidfd)
            ended(pidfds, _STOP_SECONDS)
            for core in cores:
                with contextlib.suppress(Exception):
                    core.join(_REAP_SECONDS)  # or it stays a zombie until this process starts another one
            unlink_unused(shared)
            self._band.close()
            for pidfd in pidfds:
                os.close(pidfd)

        return stop

    def forget(self) -> None:
        """Give back what vLLM leaves to the garbage collector. On the loop, after the processes have ended."""
        resources = self.llm.engine_core.resources
        hang_up(resources)
        # Two pipes of each process go with the last reference to it.
        resources.engine_manager.processes.clear()

    def sweep(self) -> None:
        """Remove vLLM's sockets, when it has been forgotten. In a thread."""
        if self._folder is not None:
            self._folder.sweep()
