"""The engine's end of the control link: one reader, which every trainer and every receiver talks to.

What it does not understand or not allow it answers with `Refuse`, counts, and otherwise forgets; a client that keeps
at it is dropped. The death of a client on this host is noticed within milliseconds, through a pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

from pitstop.engine.errors import EngineClosed, NotServing, PeerLost, PitstopError, ProtocolViolation, RemoteError
from pitstop.transports.address import listening
from pitstop.transports.client import Client, Seat
from pitstop.transports.codec import fault, from_client
from pitstop.transports.deadline import BEAT_S
from pitstop.transports.hub import Hub
from pitstop.transports.messages import (
    PROTOCOL,
    Beat,
    Bye,
    Drained,
    Faulted,
    Filled,
    FromClient,
    Hello,
    Join,
    Lend,
    LetGo,
    Propose,
    Refuse,
    Report,
    Sent,
    Welcome,
)
from pitstop.transports.pool import WRITING
from pitstop.transports.ranks import Ranks
from pitstop.transports.remote import RemoteSending
from pitstop.transports.reports import offered
from pitstop.transports.segment import Probe
from pitstop.transports.session import Step, greeted
from pitstop.transports.zmq_link import pid_space

_LOG: Final = logging.getLogger(__name__)
_TICK_S: Final = 0.1
_LAST_WORDS_S: Final = 0.05
_FORGOTTEN_S: Final = 600.0
_AT_ONCE: Final = 32
_MANY: Final = 2000
_MOST_VIOLATIONS: Final = 16
_MOST_CLIENTS: Final = 4096


class ControlLink:
    """Binds `address` (`ipc://<path>`, in a folder of mode 0700) and serves it while `run` runs.

    `listen` (`tcp://<host>:<port>`) is bound too, for clients with the key that lies in the folder `keys`, by default
    that of the socket; it is made there if it is not there yet.

    `on_offer` is called with every offer that arrives, on the event loop; it must return at once, and what it raises
    goes back to the trainer. `weight_version` and `tensors` (of the inventory) tell clients what they connect to.
    """

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        on_offer: Callable[[RemoteSending], None],
        weight_version: Callable[[], int | None] = lambda: None,
        tensors: Callable[[], int] = lambda: 0,
        listen: str | None = None,
        keys: Path | None = None,
    ) -> None:
        self.address: Final = address
        self.tcp_address: str | None = None  #: with the path of the key; None until it is bound
        self.violations = 0  #: messages that were refused since the start
        self.ticks: list[Callable[[], None]] = []  #: called about ten times a second
        self.ended: list[Callable[[], None]] = []  #: called when `run` ends
        self._listen = None if listen is None else listening(listen)
        self._keys = keys
        self._hub: Hub | None = None
        self._run_id = run_id
        self._on_offer = on_offer
        self._weight_version = weight_version
        self._tensors = tensors
        self._clients: dict[bytes, Client] = {}
        self._seats: dict[str, Seat] = {}
        self._ranks = Ranks()
        self._wake = asyncio.Event()
        self._bound = asyncio.Event()
        self._beaten = 0.0
        self._taken = False

    async def ready(self) -> None:
        """Return when clients can connect."""
        await self._bound.wait()

    @property
    def denied(self) -> int:
        """Clients that were turned away because of their key."""
        return self._hub.denied if self._hub is not None else 0

    def expect(self, token: str, seat: Seat) -> None:
        """Let a receiver with this token in."""
        self._seats[token] = seat

    def forget(self, token: str) -> None:
        """Let it in no more. One that has come stays until it is done."""
        self._seats.pop(token, None)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            LocalError: the address cannot be bound.
        """
        self._hub = hub = Hub(self.address, self._wake.set, self._listen, self._keys)
        self.tcp_address = hub.tcp_address
        probe = Probe()
        loop = asyncio.get_running_loop()
        descriptors = hub.filenos()
        for descriptor in descriptors:
            loop.add_reader(descriptor, self._wake.set)
        self._bound.set()
        try:
            while True:
                await self._read(hub, probe)
                self._bury()
                self._tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._wake.wait()
        finally:
            self._bound.clear()
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
            for identity, client in list(self._clients.items()):
                client.post(Bye())
                self._drop(identity, PeerLost("the engine was closed", peer="engine"), dead=False)
            # Sockets do not linger: what was just said needs a moment to leave.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
            hub.close()
            probe.close()
            for end in self.ended:
                end()

    async def _read(self, hub: Hub, probe: Probe) -> None:
        # The descriptor tells of changes only: what is not read now is not announced again.
        self._wake.clear()
        count, until = 0, monotonic() + _TICK_S
        while (received := hub.receive()) is not None:
            identity, frames = received
            refit_id = ""
            try:
                message = from_client(*frames)
                refit_id = getattr(message, "refit_id", "")
                await self._heard(hub, probe, identity, message)
            except PitstopError as error:
                self._refuse(hub, identity, error, refit_id or str(error.fields.get("refit_id", "")))
            except Exception as failure:  # noqa: BLE001 - the reader serves everybody, whatever one client has sent
                self._refuse(hub, identity, RemoteError(f"a message could not be dealt with: {failure!r}"), refit_id)
            count += 1
            if not count % _AT_ONCE:
                await asyncio.sleep(0)
                if monotonic() > until:
                    # Whoever never stops talking must not keep the link from its beats: the rest comes after them.
                    self._wake.set()
                    return

    async def _heard(self, hub: Hub, probe: Probe, identity: bytes, message: FromClient) -> None:
        client = self._clients.get(identity)
        if client is None:
            if not isinstance(message, Beat | Bye):  # of one that has been dropped
                self._greet(hub, probe, identity, greeted(message))
            return
        client.heard_at = monotonic()
        counts = client.session.heard(message)
        if isinstance(message, Bye):
            client.post(Bye())
            self._drop(identity, PeerLost(f"{client.name} closed its link", peer=client.name))
        elif isinstance(message, Propose):
            await self._offer(client, message)
        elif isinstance(message, Join):
            if client.group is None:
                raise ProtocolViolation("Join from a trainer of one rank")
            client.group.joined(client, message)
        elif isinstance(message, Sent | Faulted):
            WRITING.discard(message.refit_id)
            if counts and (sending := client.sendings.get(message.refit_id)) is not None:
                sending.heard(message)
        elif isinstance(message, Lend | Filled):
            if counts and (sending := client.sendings.get(message.refit_id)) is not None:
                sending.poured(message)
        elif isinstance(message, Report | LetGo | Drained) and client.seat is not None:
            client.seat.heard(message)
            if client.session.step is Step.GONE:
                # It will not say Bye: what it has to say is said, and its process may live as long as the engine.
                self._drop(identity, PeerLost(f"{client.name} has let go", peer=client.name))

    def _greet(self, hub: Hub, probe: Probe, identity: bytes, hello: Hello) -> None:
        seat = self._seats.get(hello.token) if hello.role == "receiver" else None
        if hello.role == "receiver" and seat is None:
            raise ProtocolViolation("a receiver that was not asked for, or no longer is", peer="receiver")
        # A receiver was asked for: no number of others keeps it out.
        if seat is None and len(self._clients) >= _MOST_CLIENTS:
            raise ProtocolViolation(f"more than {_MOST_CLIENTS} clients")
        self._clients[identity] = client = Client(hub, identity, hello, seat)
        client.group = self._ranks.came(client, hello)
        if client.pidfd is not None:
            asyncio.get_running_loop().add_reader(client.pidfd, self._died, identity)
        client.post(
            Welcome(
                PROTOCOL, self._run_id, os.getpid(), pid_space(), probe.path, probe.nonce, ("shared_memory",),
                self._weight_version(), self._tensors(),
            )
        )  # fmt: skip
        if seat is not None:
            self.forget(hello.token)
            seat.welcomed(client)
        else:
            _LOG.info("%s connected", client.name)

    async def _offer(self, client: Client, message: Propose) -> None:
        if any(message.refit_id in other.sendings for other in self._clients.values()):
            raise ProtocolViolation(f"refit {message.refit_id} is another trainer's")
        if client.group is not None:
            client.group.offered(message)
        try:
            many = len(message.tensors) > _MANY
            offer = await asyncio.to_thread(offered, message) if many else offered(message)
            sending = RemoteSending(
                offer, client, message.policy, message.deadlines, rebase=message.rebase, mode=message.mode
            )
            client.sendings[message.refit_id] = sending
            try:
                self._on_offer(sending)
            except EngineClosed:
                raise self._not_open() from None
            self._taken = True
        except Exception as failure:  # noqa: BLE001 - the reader serves everybody, whatever one offer does to its taker
            error = failure if isinstance(failure, PitstopError) else RemoteError(f"the offer failed: {failure!r}")
            _LOG.warning("an offer of %s was refused: %s", client.name, error)
            client.settled(message.refit_id)
            client.post(Refuse(fault(error), message.refit_id))

    def _not_open(self) -> PitstopError:
        """What an engine's complaint about its own user means to a trainer."""
        if self._taken:
            return EngineClosed("the engine is being closed")
        return NotServing("the engine is still starting (or is being closed): publish again when it serves")

    def _refuse(self, hub: Hub, identity: bytes, error: PitstopError, refit_id: str) -> None:
        self.violations += 1
        client = self._clients.get(identity)
        _LOG.warning("%s: %s", "a client" if client is None else client.name, error)
        # About one refit if it can be: what is wrong with one is no reason to end the others of that client.
        hub.send(identity, Refuse(fault(error), refit_id))
        if client is not None:
            client.violations += 1
            if client.violations >= _MOST_VIOLATIONS:
                self._drop(identity, error, dead=False)

    def _died(self, identity: bytes) -> None:
        client = self._clients.get(identity)
        if client is not None and client.pidfd is not None:
            asyncio.get_running_loop().remove_reader(client.pidfd)
            client.died_at = monotonic()
            self._wake.set()

    def _bury(self) -> None:
        for identity, client in list(self._clients.items()):
            # What it said last may still be on its way here, and counts.
            if client.died_at is not None and monotonic() - client.died_at > _LAST_WORDS_S:
                self._drop(identity, PeerLost(f"{client.name} died", peer=client.name))
            elif client.pidfd is None and monotonic() - client.heard_at > _FORGOTTEN_S:
                self._drop(identity, PeerLost(f"{client.name} is gone", peer=client.name), dead=False)

    def _drop(self, identity: bytes, error: PitstopError, *, dead: bool = True) -> None:
        """Forget a client; `dead`: it cannot touch a segment any more."""
        client = self._clients.pop(identity, None)
        if client is None:
            return
        if client.pidfd is not None:
            asyncio.get_running_loop().remove_reader(client.pidfd)
            os.close(client.pidfd)
        for refit_id, sending in list(client.sendings.items()):
            if dead:
                WRITING.discard(refit_id)
            sending.failed(error)
        if client.seat is not None and dead:
            client.seat.lost(error)
        self._ranks.went(client, error)

    def _tick(self) -> None:
        now = monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            for client in self._clients.values():
                if client.beats:
                    client.post(Beat())
        for client in list(self._clients.values()):
            for sending in list(client.sendings.values()):
                sending.tick()
        self._ranks.tick()
        for tick in self.ticks:
            tick()
