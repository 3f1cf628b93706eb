"""A deterministic engine with modelled delays and injectable faults; its transport is in `simulated_transport`.

For tests of this package and of loops built on it: no GPU, no model, microseconds a step. A token tells which
weights made it (`token_for`), a torn model makes `TORN`, and each call can be told to raise, hang or die.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pitstop.engine.counters import Counters, Series, flatten
from pitstop.engine.errors import PitstopError, RemoteError, ReplicaDied
from pitstop.engine.ports import Booted
from pitstop.engine.refit import Policy
from pitstop.engine.request import FinishReason, Piece, Request
from pitstop.engine.simulated_transport import Fault, Script, SimulatedSending, SimulatedTransport
from pitstop.engine.worker_ports import Inventory, Seen, TensorSpec, WorkerLayout, WorkerOp, WorkerReply

__all__ = [
    "TORN", "VOCAB", "Delays", "Fault", "Script", "SimulatedBackend", "SimulatedLeg", "SimulatedSending",
    "SimulatedTransport", "token_for",
]  # fmt: skip

TORN: Final = 999_999
"""The token of a model whose tensors are not all of one version."""
VOCAB: Final = 1_000_000


def token_for(version: int, prompt: Sequence[int], index: int) -> int:
    """The token that weights `version` make at `index` after `prompt`."""
    return (version * 7919 + sum(prompt) * 31 + index) % 900_000


@dataclass(slots=True)
class Delays:
    """Modelled seconds. Zero still yields to the event loop."""

    step: float = 0.0
    call: float = 0.0
    boot: float = 0.0


class SimulatedLeg:
    """A request inside a simulated engine."""

    def __init__(self, engine: SimulatedBackend, request: Request) -> None:
        self.request = request
        self.made = 0
        self.aborts = 0
        self.finish: FinishReason | None = None
        self._engine = engine
        self._ready: list[int] = []
        self._taken = False
        self._event = asyncio.Event()

    def step(self, token: int) -> None:
        """One token more."""
        self.made += 1
        self._ready.append(token)
        if self.made >= self.request.max_tokens:
            self.end("length")
        if self.request.deltas or self.finish:
            self._event.set()

    def end(self, reason: FinishReason) -> None:
        """Leave the engine."""
        if self.finish is None:
            self.finish = reason
            self._engine.left(self)
        self._event.set()

    async def next(self) -> Piece:
        """See `Leg.next`."""
        await self._event.wait()
        self._event.clear()
        if self._engine.death is not None and self.finish is None:
            self._event.set()
            raise self._engine.death
        if self.finish is not None:
            self._event.set()
        return self._piece(self.finish)

    def partial(self) -> Piece:
        """See `Leg.partial`."""
        return self._piece("error")

    def abort(self) -> None:
        """See `Leg.abort`."""
        if self.finish is None:
            self.aborts += 1
            self._engine.aborts += 1
            self.end("abort")

    def _piece(self, reason: FinishReason | None) -> Piece:
        tokens, self._ready = self._ready, []
        logprobs = [-1.0] * len(tokens) if self.request.params.logprobs else []
        return Piece(tokens, logprobs, finish_reason=reason)


class SimulatedBackend:
    """Implements `Backend`. `tensors` names the model's parameters; a version is whole when all carry it.

    `drafter` says which share of a drafter's tokens a version accepts; it drafts one a step, for each request.
    """

    def __init__(
        self,
        *,
        tensors: Iterable[str] = ("a", "b", "c"),
        weight_version: int | None = 0,
        max_model_len: int = 4096,
        world_size: int = 1,
        delays: Delays | None = None,
        script: Script | None = None,
        drafter: Callable[[int], float] | None = None,
    ) -> None:
        self.specs = tuple(TensorSpec(name, "float32", (4,)) for name in tensors)
        self.script = script or Script()
        self.delays = delays or Delays()
        self.live: dict[str, int | None] = {}
        self.legs: dict[str, SimulatedLeg] = {}
        self.steps = 0
        self.aborts = 0
        self.tokens = 0
        self.accepted = 0.0
        self.drafter = drafter
        self.paused = False
        self.death: PitstopError | None = None
        self.transport: SimulatedTransport | None = None
        self._boots_with = weight_version
        self._max_model_len = max_model_len
        self._world_size = world_size
        self._staged: dict[str, int | None] = {}
        self._touched: set[str] = set()
        self._receivers: dict[str, list[asyncio.Task[None]]] = {}
        self._name = ""
        self._incarnation = 0
        self._wake = asyncio.Event()
        self._dead = asyncio.Event()
        self._none_live = asyncio.Event()
        self._outputs: list[asyncio.Future[float]] = []
        self._output_at = 0.0
        self._core: asyncio.Task[None] | None = None

    async def start(self, replica: str, incarnation: int) -> Booted:
        """See `Backend.start`."""
        self._name, self._incarnation = replica, incarnation
        self.death, self._dead, self.paused = None, asyncio.Event(), False
        self.legs, self._staged, self._touched = {}, {}, set()
        self.tokens, self.accepted = 0, 0.0
        self._none_live.set()
        await self._call("start", self.delays.boot)
        version = self._boots_with if incarnation == 1 else None
        self.live = {spec.name: version for spec in self.specs}
        self._core = asyncio.create_task(self._run(), name=f"{replica}:core")
        layout = tuple(
            WorkerLayout(replica, incarnation, rank, self._world_size, 0, "simulated")
            for rank in range(self._world_size)
        )
        return Booted(version, Inventory(self.specs), layout, self._max_model_len, VOCAB)

    async def submit(self, request: Request) -> SimulatedLeg:
        """See `Backend.submit`."""
        await self._call("submit")
        leg = SimulatedLeg(self, request)
        self.legs[request.request_id] = leg
        self._none_live.clear()
        self._wake.set()
        return leg

    async def suspend(self, policy: Policy) -> Mapping[str, int]:
        """See `Backend.suspend`."""
        await self._call("suspend")
        self.paused = True
        return {request_id: leg.made for request_id, leg in self.legs.items()}

    async def resume(self) -> None:
        """See `Backend.resume`."""
        await self._call("resume")
        self.paused = False
        self._wake.set()

    async def drained(self) -> None:
        """See `Backend.drained`."""
        await self._none_live.wait()

    async def reset_cache(self) -> bool:
        """See `Backend.reset_cache`."""
        await self._call("reset_cache")
        return True

    async def label(self, weight_version: int) -> None:
        """See `Backend.label`."""
        await self._call("label")

    async def call_workers(self, op: WorkerOp) -> Sequence[WorkerReply]:
        """See `Backend.call_workers`. A fault in `apply` strikes after the first tensor."""
        if op.verb == "apply":
            return await self._apply(op)
        await self._call(op.verb)
        if op.verb == "receive":
            for ticket in op.tickets:
                self._staged[op.refit_id] = None
                if self.transport is not None and (receiver := self.transport.receive(ticket, self)) is not None:
                    self._receivers.setdefault(op.refit_id, []).append(receiver)
        elif op.verb in ("undo", "release"):
            self._stop_receiving(op.refit_id)
        elif op.verb == "fingerprint":
            found = {name: str(version) for name, version in self.live.items()}
            return [
                WorkerReply(rank, fingerprint=found, seen=Seen(16 * len(found))) for rank in range(self._world_size)
            ]
        touched = op.refit_id in self._touched
        if op.verb == "release":
            self._staged.pop(op.refit_id, None)
            self._touched.discard(op.refit_id)
        return [WorkerReply(rank, touched) for rank in range(self._world_size)]

    async def load(self, refit_id: str, name: str, version: int) -> None:
        """A receiver has a tensor for the live model."""
        await asyncio.sleep(0)
        fault = self.script.next("load")
        if fault in ("raise", "hang", "die"):
            await self._strike(fault, "load")
        self._touched.add(refit_id)
        self.live[name] = version - 1 if fault == "lie" else version

    def landed(self, refit_id: str, version: int) -> None:
        """A receiver has the whole version in its hands."""
        self._staged[refit_id] = version

    async def sleep(self, level: int) -> None:
        """See `Backend.sleep`."""
        await self._call("sleep")
        if level >= 2:
            self.live = dict.fromkeys(self.live)

    async def wake(self, *, kv_cache: bool) -> None:
        """See `Backend.wake`."""
        await self._call("wake")
        if kv_cache:
            self.paused = False
            self._wake.set()

    async def died(self) -> PitstopError:
        """See `Backend.died`."""
        await self._dead.wait()
        assert self.death is not None
        return self.death

    async def close(self) -> None:
        """See `Backend.close`."""
        if self._core is not None:
            self._core.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._core
        for leg in list(self.legs.values()):
            leg.abort()
        self._stop_receiving()

    def output_at(self) -> float:
        """See `Backend.output_at`."""
        return self._output_at

    async def output_after(self, moment: float) -> float:
        """See `Backend.output_after`."""
        while self._output_at <= moment:
            future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            self._outputs.append(future)
            await future
        return self._output_at

    async def counters(self) -> Counters:
        """See `Backend.counters`."""
        await self._call("counters")
        series = [
            Series("vllm:generation_tokens", self.tokens),
            Series("vllm:num_requests_running", len(self.legs), gauge=True),
        ]
        if self.drafter is not None:
            series += [
                Series("vllm:spec_decode_num_drafts", self.tokens),
                Series("vllm:spec_decode_num_draft_tokens", self.tokens),
                Series("vllm:spec_decode_num_accepted_tokens", self.accepted),
                Series("vllm:spec_decode_num_accepted_tokens_per_pos", self.accepted, {"position": "0"}),
            ]
        return flatten(series, self._incarnation)

    def die(self) -> None:
        """Die now, as by SIGKILL."""
        if self.death is None:
            self.death = ReplicaDied(f"the engine of {self._name} died", replica=self._name)
            if self._core is not None:
                self._core.cancel()
            for leg in list(self.legs.values()):
                leg._event.set()
            self._stop_receiving()
            self._dead.set()

    def left(self, leg: SimulatedLeg) -> None:
        """A leg has ended."""
        self.legs.pop(leg.request.request_id, None)
        if not self.legs:
            self._none_live.set()

    def _stop_receiving(self, refit_id: str | None = None) -> None:
        for name in list(self._receivers) if refit_id is None else [refit_id]:
            for receiver in self._receivers.pop(name, []):
                receiver.cancel()

    async def _apply(self, op: WorkerOp) -> Sequence[WorkerReply]:
        version, in_place = self._staged.get(op.refit_id), op.refit_id in self._touched
        fault = self.script.next("apply")
        if version is None and not in_place:
            error = RemoteError("nothing has landed").record()
            return [WorkerReply(rank, error=error) for rank in range(self._world_size)]
        self._touched.add(op.refit_id)
        for n, name in enumerate(self.live):
            if not in_place:
                self.live[name] = version
            await asyncio.sleep(0)
            if n == 0 and fault is not None:
                if fault == "raise":
                    error = RemoteError("scripted: apply").record()
                    return [WorkerReply(rank, touched=True, error=error) for rank in range(self._world_size)]
                await self._strike(fault, "apply")
        return [WorkerReply(rank, touched=True) for rank in range(self._world_size)]

    async def _call(self, name: str, seconds: float | None = None) -> None:
        if self.death is not None:
            raise self.death
        await asyncio.sleep(self.delays.call if seconds is None else seconds)
        if self.death is not None:
            raise self.death
        fault = self.script.next(name)
        if fault is not None:
            await self._strike(fault, name)

    async def _strike(self, fault: Fault, name: str) -> None:
        if fault == "raise":
            raise RemoteError(f"scripted: {name}")
        if fault == "die":
            self.die()
            raise self.death or RemoteError("dead")
        await asyncio.Event().wait()

    async def _run(self) -> None:
        while True:
            if self.paused or not self.legs:
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(self.delays.step)
            if not self.paused:
                self._step()

    def _step(self) -> None:
        self.steps += 1
        versions = set(self.live.values())
        version = versions.pop() if len(versions) == 1 else None
        for leg in list(self.legs.values()):
            prompt = leg.request.prompt_token_ids
            leg.step(TORN if version is None else token_for(version, prompt, leg.made))
            self.tokens += 1
            if self.drafter is not None and version is not None:
                self.accepted += self.drafter(version)
        self._output_at = time.monotonic()
        outputs, self._outputs = self._outputs, []
        for future in outputs:
            if not future.done():
                future.set_result(self._output_at)
