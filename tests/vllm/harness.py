"""A replica as the tests drive it: prompts in, tokens out, refits without a transport."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pitstop.engine.errors import from_record
from pitstop.engine.ports import Booted
from pitstop.engine.request import Piece, Request, SamplingParams
from pitstop.engine.vllm_backend import VllmBackend
from pitstop.engine.vllm_backend.leg import VllmLeg
from pitstop.engine.worker_ports import Placed, TensorSpec, Ticket, Ways, WorkerOp, WorkerReply, WorkerVerb
from tests.checkpoints import BOS

if TYPE_CHECKING:
    from torch import Tensor

PROMPT = (BOS, *range(64, 84))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

_ids = itertools.count()


class Made(NamedTuple):
    """What a request came to."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    last: Piece


def request(
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 24,
    params: SamplingParams = GREEDY,
    *,
    request_id: str | None = None,
    salt: str = "w0",
    deltas: bool = True,
    text: bool = False,
    **more: Any,
) -> Request:
    return Request(
        request_id=request_id or f"r{next(_ids)}", prompt_token_ids=tuple(prompt), params=params, max_tokens=max_tokens,
        cache_salt=salt, deltas=deltas, text=text, **more,
    )  # fmt: skip


async def drain(leg: VllmLeg, made: Sequence[Piece] = ()) -> Made:
    pieces = list(made)
    while not pieces or pieces[-1].finish_reason is None:
        pieces.append(await leg.next())
    return Made(
        [token for piece in pieces for token in piece.token_ids],
        [logprob for piece in pieces for logprob in piece.logprobs],
        "".join(piece.text for piece in pieces),
        pieces[-1],
    )


async def until(leg: VllmLeg, count: int) -> list[Piece]:
    """Take pieces until there are at least `count` tokens."""
    pieces: list[Piece] = []
    while sum(len(piece.token_ids) for piece in pieces) < count:
        pieces.append(await leg.next())
    return pieces


class Replica:
    """A backend, with refits from files."""

    def __init__(self, backend: VllmBackend, folder: Path, receiver: str) -> None:
        self.backend, self._folder, self._receiver = backend, folder, receiver
        self.booted: Booted
        self._news: socket.socket

    async def start(self, incarnation: int = 1) -> None:
        self._folder.mkdir(exist_ok=True)
        self.booted = await self.backend.start("replica-0", incarnation)
        self._news = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._news.setblocking(False)
        (self._folder / "news").unlink(missing_ok=True)
        self._news.bind(str(self._folder / "news"))

    async def close(self) -> None:
        await self.backend.close()
        if hasattr(self, "_news"):
            self._news.close()

    async def run(self, asked: Request | None = None, **more: Any) -> Made:
        return await drain(await self.backend.submit(asked or request(**more)))

    def tickets(self, refit_id: str, tensors: Mapping[str, Tensor], *, token: str = "") -> tuple[Ticket, ...]:
        """Write tensors to a file as a transport lays them out, and return what the workers need to read it."""
        import torch

        placed, content, offset = [], [], 0
        for name, tensor in tensors.items():
            data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            placed.append(Placed(spec, offset))
            padding = -len(data) % 512
            content.append(data + bytes(padding))
            offset += len(data) + padding
        path = self._folder / f"{refit_id}.bin"
        path.write_bytes(b"".join(content) or bytes(512))
        return tuple(
            Ticket(
                refit_id, place.replica, place.incarnation, place.rank, self._receiver, str(path), offset,
                tuple(placed), str(self._folder / "news"), token, 10.0, 5.0,
            )
            for place in self.booted.layout
        )  # fmt: skip

    async def tell(self, verb: WorkerVerb, refit_id: str, tickets: tuple[Ticket, ...] = ()) -> Sequence[WorkerReply]:
        return await self.backend.call_workers(WorkerOp(verb, refit_id, tickets))

    async def ask(self, verb: WorkerVerb, refit_id: str, tickets: tuple[Ticket, ...] = ()) -> Sequence[WorkerReply]:
        """Tell the workers, and raise the first error among their replies."""
        replies = await self.tell(verb, refit_id, tickets)
        for reply in replies:
            if reply.error is not None:
                raise from_record(reply.error)
        return replies

    async def hear(self) -> list[str]:
        """Return what the receiver of every rank says next, by rank."""
        said: dict[str, str] = {}
        while len(said) < len(self.booted.layout):
            rank, _, word = (await asyncio.get_running_loop().sock_recv(self._news, 256)).decode().partition(" ")
            said[rank] = word
        return [said[rank] for rank in sorted(said)]

    async def heard(self, what: str) -> None:
        """Wait until every rank's receiver has said `what`."""
        assert set(await self.hear()) == {what}

    async def addresses(self) -> list[str]:
        """Return what stands for the addresses of each rank's parameters."""
        await self.ask("receive", "addresses", self.tickets("addresses", {}, token="addresses"))
        found = await self.hear()
        await self.ask("release", "addresses")
        await self.heard("closed")
        return found

    async def land(self, refit_id: str, tensors: Mapping[str, Tensor]) -> None:
        await self.ask("receive", refit_id, self.tickets(refit_id, tensors))
        await self.heard("landed")

    async def feed(
        self, refit_id: str, tensors: Mapping[str, Tensor], groups: int = 4, *, seed: int = 0, stop: int = -1
    ) -> list[str]:
        """Receive in place, in shuffled groups; return what came of it. The engine must be suspended."""
        tickets = self.tickets(refit_id, tensors, token=f"{groups} {seed} {stop}")
        await self.ask("receive", refit_id, tuple(replace(ticket, in_place=True) for ticket in tickets))
        return await self.hear()

    async def refit_in_place(self, tensors: Mapping[str, Tensor], groups: int = 4, *, seed: int = 0) -> Ways:
        """A whole refit in place, with KV caches recomputed; return how the first rank's tensors were loaded."""
        name = f"refit-{next(_ids)}"
        await self.backend.suspend("recompute")
        assert set(await self.feed(name, tensors, groups, seed=seed)) == {"landed"}
        ways = await self.swap(name)
        await self.backend.resume()
        return ways

    async def fingerprint(self) -> list[dict[str, str] | None]:
        """Return what the memory of each rank's model holds."""
        return [reply.fingerprint for reply in await self.ask("fingerprint", "")]

    async def swap(self, refit_id: str) -> Ways:
        """Put what landed into the model; the engine must be suspended."""
        await self.ask("apply", refit_id)
        ways = (await self.ask("finalize", refit_id))[0].ways
        assert ways is not None
        await self.ask("release", refit_id)
        await self.heard("closed")
        return ways

    async def refit(self, tensors: Mapping[str, Tensor], refit_id: str | None = None) -> Ways:
        """A whole refit of an engine that may be busy; return how the first rank's tensors were loaded."""
        name = refit_id or f"refit-{next(_ids)}"
        await self.land(name, tensors)
        await self.backend.suspend("recompute")
        ways = await self.swap(name)
        await self.backend.resume()
        return ways
