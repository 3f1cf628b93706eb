"""A transport through files, for fleets of real engines: the engine's side of what `FileReceiver` reads and says."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pitstop.engine.errors import DigestMismatch, PitstopError, WorkerFailed
from pitstop.engine.ports import Ring
from pitstop.engine.refit import RefitReport
from pitstop.engine.worker_ports import (
    Manifest,
    Mode,
    Offer,
    Placed,
    Progress,
    ProgressKind,
    TensorSpec,
    Ticket,
    Trailer,
    WorkerLayout,
)

if TYPE_CHECKING:
    from torch import Tensor


class FileTransport:
    """Always in place. Of replicas in `spoiled` all lands, and the proof fails; those in `halted` stop half way."""

    name = "file"

    def __init__(self, folder: Path, receiver: str) -> None:
        self.spoiled: set[str] = set()
        self.halted: set[str] = set()
        self._folder, self._receiver = folder, receiver
        self._heard: dict[str, asyncio.Queue[Progress]] = {}
        self._listening: list[asyncio.Task[None]] = []

    async def plan(
        self,
        offer: Offer,
        manifest: Manifest,
        receivers: Sequence[WorkerLayout],
        limits: tuple[float, float],
        mode: Mode = "auto",
    ) -> Sequence[Ticket]:
        placed, at = [], 0
        for row in manifest.rows:
            placed.append(Placed(row.spec, at))
            at += -(-row.spec.nbytes // 512) * 512
        heard = self._heard[offer.refit_id] = asyncio.Queue[Progress]()
        tickets = []
        for n, place in enumerate(receivers):
            address = str(self._folder / f"{offer.refit_id[:8]}-{n}")
            token = f"40 {n} {12 if place.replica in self.halted else -1}"
            ticket = Ticket(
                offer.refit_id, place.replica, place.incarnation, place.rank, self._receiver,
                str(self._folder / f"{offer.refit_id}.bin"), at, tuple(placed), address, token, *limits,
                slots=1, in_place=True,
            )  # fmt: skip
            self._listening.append(asyncio.create_task(self._listen(ticket, heard)))
            tickets.append(ticket)
        await asyncio.sleep(0)
        return tickets

    async def _listen(self, ticket: Ticket, heard: asyncio.Queue[Progress]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
            news.setblocking(False)
            news.bind(ticket.address)
            while True:
                said = (await asyncio.get_running_loop().sock_recv(news, 256)).decode().partition(" ")[2]
                kind, error = _understood(said)
                if kind == "landed" and ticket.replica in self.spoiled:
                    kind, error = "failed", DigestMismatch("not what was sent")
                if kind is not None:
                    record = None if error is None else error.record()
                    life = (ticket.replica, ticket.incarnation, ticket.rank)
                    heard.put_nowait(Progress(ticket.refit_id, *life, kind, error=record))

    def ring(self, refit_id: str) -> Ring | None:
        return None

    async def seal(self, trailer: Trailer) -> None: ...

    async def watch(self, refit_id: str) -> AsyncIterator[Progress]:
        while True:
            yield await self._heard[refit_id].get()

    async def abort(self, refit_id: str, why: PitstopError) -> None: ...

    async def release(self, refit_id: str) -> None: ...

    def replay(self, weight_version: int) -> None:
        return None

    def close(self) -> None:
        for task in self._listening:
            task.cancel()


def _understood(said: str) -> tuple[ProgressKind | None, PitstopError | None]:
    if said in ("attached", "landed"):
        return said, None  # type: ignore[return-value]
    return (None, None) if said in ("half way", "aborted", "closed") else ("failed", WorkerFailed(said))


class FileSending:
    """A trainer that writes a file."""

    def __init__(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        specs = tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())
        self.offer = Offer(os.urandom(16).hex(), version, specs)
        self._tensors = tensors

    async def send(self, manifest: Manifest, tickets: Sequence[Ticket], ring: Ring | None = None) -> Trailer:
        import torch

        content = bytearray(tickets[0].nbytes)
        for placed in tickets[0].tensors:
            data = self._tensors[placed.spec.name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            content[placed.offset : placed.offset + len(data)] = data
        path = tickets[0].buffer
        Path(f"{path}.part").write_bytes(content)  # noqa: ASYNC240
        Path(f"{path}.part").rename(path)  # noqa: ASYNC240
        return Trailer(self.offer.refit_id, (self.offer.weight_version,) * len(manifest.rows))

    async def settled(self, report: RefitReport) -> None: ...
