"""Which way weights can travel between this process and an engine."""

from __future__ import annotations

from pitstop.engine.errors import LocalError
from pitstop.transports.deadline import Limit
from pitstop.transports.messages import Welcome
from pitstop.transports.segment import why_not
from pitstop.transports.zmq_link import Line, Rank, pid_space


def connected(address: str, seconds: float, rank: Rank) -> tuple[Line, Welcome, str]:
    """Connect as a trainer, within `seconds`; return the line, what the engine said, and how weights can travel.

    Raises:
        PitstopError: see `Publisher.connect`.
    """
    line = Line(address)
    try:
        welcome = line.greet("trainer", Limit(seconds), rank=rank)
        return line, welcome, negotiate(welcome, address)
    except BaseException:
        line.close()
        raise


def negotiate(welcome: Welcome, address: str) -> str:
    """Return the best transport that the engine offers and that works from here.

    Raises:
        LocalError: there is none; says why not, transport by transport.
    """
    if "shared_memory" not in welcome.transports:
        why = f"the engine offers {', '.join(welcome.transports) or 'none'}"
    elif welcome.pid_space and welcome.pid_space != pid_space():
        why = "the engine runs on another host, or in a container of its own, so its memory cannot be shared from here"
    else:
        why = why_not(welcome.probe, welcome.nonce) or ""
    if why:
        raise LocalError(f"no transport to the engine at {address}: shared_memory: {why}", address=address)
    return "shared_memory"
