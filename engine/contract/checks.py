"""How claims are listed, run and broken."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from pitstop.engine.errors import PitstopError
from pitstop.engine.ports import Transport
from pitstop.engine.worker_ports import Progress

B = TypeVar("B")
T = TypeVar("T")
Check = Callable[[], Awaitable[None]]


class ContractBroken(AssertionError):
    """Raised when a claim of a contract does not hold."""


def holds(condition: object, otherwise: str) -> None:
    """Raise `ContractBroken` unless `condition` is true. Not an `assert`, which `python -O` leaves out."""
    if not condition:
        raise ContractBroken(otherwise)


class Contract(Generic[B]):
    """Claims about what `make` makes. `limit`: seconds in which each must be shown."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[B]], *, limit: float = 60.0) -> None:
        self.make = make
        self.limit = limit

    @classmethod
    def claims(cls) -> tuple[str, ...]:
        """Return the names of all claims, in order. For runners whose fixtures `make` needs: see `check`."""
        own = [
            name
            for kind in reversed(cls.__mro__)
            if kind is not Contract
            for name, member in vars(kind).items()
            if inspect.iscoroutinefunction(member) and not name.startswith("_")
        ]
        return tuple(name for name in dict.fromkeys(own) if name not in vars(Contract))

    def checks(self) -> Sequence[Check]:
        """Return every claim as a call without arguments, named as the claim."""
        return [self._bounded(name) for name in self.claims()]

    async def check(self, claim: str) -> None:
        """Check one claim by name.

        Raises:
            ContractBroken: it does not hold, or could not be shown within `limit`.
            unittest.SkipTest: the bench has no means to check it.
        """
        try:
            async with asyncio.timeout(self.limit):
                await getattr(self, claim)()
        except TimeoutError as error:
            raise ContractBroken(f"{claim}: not shown within {self.limit:g} s") from error

    def _bounded(self, claim: str) -> Check:
        @functools.wraps(getattr(self, claim))
        async def checked() -> None:
            await self.check(claim)

        return checked


async def soon(what: Awaitable[T], otherwise: str, seconds: float = 10.0) -> T:
    """Await something that must end; raise `ContractBroken` if it takes too long."""
    try:
        async with asyncio.timeout(seconds):
            return await what
    except TimeoutError:
        raise ContractBroken(f"{otherwise} within {seconds:g} s") from None


async def raised(what: Awaitable[Any], kind: type[PitstopError], otherwise: str) -> PitstopError:
    """Await something that must raise a `kind`; return the error."""
    try:
        await soon(what, otherwise)
    except kind as error:
        return error
    except PitstopError as error:
        raise ContractBroken(f"{otherwise}; it raised {error!r}") from error
    raise ContractBroken(otherwise)


class Ends:
    """Listens to a refit's progress, and keeps how each receiver ended."""

    def __init__(self, transport: Transport, refit_id: str) -> None:
        self.said: list[Progress] = []
        self._task = asyncio.create_task(self._listen(transport, refit_id))
        self._news = asyncio.Event()

    async def _listen(self, transport: Transport, refit_id: str) -> None:
        async for progress in transport.watch(refit_id):
            self.said.append(progress)
            self._news.set()

    @property
    def over(self) -> list[Progress]:
        """The last words of receivers."""
        return [progress for progress in self.said if progress.kind != "attached"]

    async def reached(self, count: int, seconds: float = 20.0) -> list[Progress]:
        """Wait for the end of `count` receivers; return how they ended, by replica and rank."""

        async def enough() -> None:
            while len(self.over) < count:
                self._news.clear()
                await self._news.wait()

        await soon(enough(), f"{count} receivers did not all end; {len(self.over)} did,", seconds)
        return sorted(self.over, key=lambda progress: (progress.replica, progress.rank))

    async def attached(self, count: int, seconds: float = 10.0) -> None:
        """Wait until `count` receivers have come; not for ever, since a transport need not say so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len({(p.replica, p.rank) for p in self.said}) < count:
                    self._news.clear()
                    await self._news.wait()

    async def ended(self) -> None:
        """Wait for the end of the watch itself."""
        await soon(asyncio.shield(self._task), "the watch did not end")

    def drop(self) -> None:
        """Listen no more."""
        self._task.cancel()
