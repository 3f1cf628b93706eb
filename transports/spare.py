"""Spare memory of a worker process, in which staged versions wait for their swap: one version a rank, never two.

What lies in host memory is kept for the next refit: memory that is touched for the first time takes several times
longer, and memory that a GPU's copy engine may use takes seconds to be had.
"""

from __future__ import annotations

import logging
from threading import Condition
from time import monotonic
from typing import TYPE_CHECKING, Final

from pitstop.engine.errors import DeadlineExceeded, WorkerFailed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pitstop.engine.worker_ports import Ticket

_LOG: Final = logging.getLogger(__name__)


class Spare:
    """The process's. `claim` before memory is taken for a ticket, `free` when nothing refers to it any more."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._claimed: dict[tuple[str, str, int], str] = {}
        self._memory: tuple[Tensor, torch.device | None] | None = None

    def claim(self, ticket: Ticket) -> None:
        """Have the ticket's rank stage this version.

        Raises:
            DeadlineExceeded: another one is still there; a refit that was given up lets go of its own in a moment.
        """
        rank, until = _rank(ticket), monotonic() + ticket.silence_s
        with self._changed:
            while rank in self._claimed:
                if not self._changed.wait(until - monotonic()) and monotonic() >= until:
                    raise DeadlineExceeded(
                        f"rank {ticket.rank} still holds the version of refit {self._claimed[rank]}, and two are not "
                        f"staged at once: it was not let go of within {ticket.silence_s:g} s",
                        phase="stage", peer="sink", replica=ticket.replica, rank=ticket.rank, seconds=ticket.silence_s,
                    )  # fmt: skip
            self._claimed[rank] = ticket.refit_id

    def take(self, nbytes: int, device: torch.device | None = None) -> Tensor:
        """Return bytes of host memory, those of an earlier refit if they do: such as `device` copies to by itself."""
        import torch

        with self._changed:
            kept, self._memory = self._memory, None
        if kept is not None and kept[0].nbytes >= nbytes and device in (None, kept[1]):
            return kept[0]
        del kept  # before there is more: both take memory
        if device is None or device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8)
        from pitstop.transports.cuda_memory import locked

        try:
            return locked(device, nbytes)
        except WorkerFailed as error:
            _LOG.warning("%s; versions wait in ordinary memory, to and from which copies take longer", error.message)
            return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, ticket: Ticket, memory: Tensor | None = None, device: torch.device | None = None) -> None:
        """Let the next version be staged; host memory is kept for it."""
        with self._changed:
            if memory is not None:
                self._memory = memory, device
            if self._claimed.get(_rank(ticket)) == ticket.refit_id:
                del self._claimed[_rank(ticket)]
            self._changed.notify_all()

    def drop(self) -> None:
        """Keep nothing: who stages elsewhere, or not at all, has no use for it."""
        with self._changed:
            kept, self._memory = self._memory, None
        del kept  # which takes its time


def _rank(ticket: Ticket) -> tuple[str, str, int]:
    return ticket.address, ticket.replica, ticket.rank


spare: Final = Spare()
