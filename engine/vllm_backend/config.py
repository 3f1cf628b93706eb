"""What one replica's engine is started with beside what the caller asked for. Pure: records in, records out.

Where it runs (GPUs, CPUs), which ports it may use, where its caches lie, how long a request may get. A caller's own
choice wins everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
PORT: Final = "VLLM_PORT"
CACHE_ROOT: Final = "VLLM_CACHE_ROOT"
SOCKETS: Final = "VLLM_RPC_BASE_PATH"

_FIRST_PORT: Final = 7000
_BAND: Final = 100
_LOWEST_PORT: Final = 1024


@dataclass(frozen=True, slots=True)
class Seat:
    """Which replica of how many this is, and the GPUs that its caller chose for it (None: choose)."""

    index: int = 0
    replicas: int = 1
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """What there is on this machine. `devices` are what this process sees, in CUDA's words; none without a GPU.

    `ephemeral` is the first of the ports that the kernel gives away by itself.
    """

    devices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ephemeral: int = 32768
    home: str = "~"


def ranks(arguments: Mapping[str, Any]) -> int:
    """Return how many worker processes, and so how many GPUs, an engine has."""
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


def placed(seat: Seat, arguments: Mapping[str, Any], host: Host) -> tuple[str, ...] | None:
    """Return the GPUs of a replica; None if that is not for us to say.

    Raises:
        EngineArgumentRejected: there are not enough of them.
    """
    each = ranks(arguments)
    if seat.devices is not None:
        if len(seat.devices) != each:
            raise EngineArgumentRejected(
                f"replica {seat.index} has {each} ranks, and was given the GPUs {', '.join(seat.devices) or 'none'}",
                argument="devices",
            )
        return seat.devices
    # Ray places its workers itself, and on the CPU there is nothing to choose.
    if not host.devices or arguments.get("distributed_executor_backend") == "ray":
        return None
    if seat.replicas == 1 and each <= len(host.devices):
        return None
    if seat.replicas * each > len(host.devices):
        raise EngineArgumentRejected(
            f"{seat.replicas} replicas of {each} ranks need {seat.replicas * each} GPUs, {len(host.devices)} are "
            "visible: launch fewer, or say with devices=[[...], ...] which of them share one",
            argument="replicas",
        )
    return host.devices[seat.index * each : (seat.index + 1) * each]


def executor(arguments: Mapping[str, Any]) -> str | None:
    """Return the executor of an engine; None leaves it to vLLM, which takes none for one rank.

    With several, vLLM would look for a Ray cluster where it sees too few GPUs: all ranks of a replica are on one host.
    """
    return "mp" if "distributed_executor_backend" not in arguments and ranks(arguments) > 1 else None


def bands(host: Host) -> Sequence[int]:
    """Return where a replica's band of ports may begin, best first.

    Below what the kernel gives away, so that nothing takes a port of a band by chance. The first port of a band stands
    for all of it: whoever holds that one has the band, and vLLM looks for free ones from the next on.
    """
    asked, end = host.environment.get(PORT), host.ephemeral
    if asked is not None and asked.isdigit():
        return range(int(asked), (end if int(asked) < end else 65536) - _BAND + 1, _BAND)
    first = min(_FIRST_PORT, max(_LOWEST_PORT, end - 10 * _BAND))
    return range(first, end - _BAND + 1, _BAND)


def cache_root(seat: Seat, arguments: Mapping[str, Any], host: Host) -> str | None:
    """Return a replica's own folder for vLLM's caches, where sharing one is not safe; None where it is.

    Replicas that compile write the same index files, in place, at the same time. The first keeps the common folder and
    each other one has its own, under the same name at every launch, so nothing is compiled twice for it.
    """
    if seat.index == 0 or arguments.get("enforce_eager"):
        return None
    root = host.environment.get(CACHE_ROOT) or str(PurePath(host.home, ".cache", "vllm"))
    return f"{root}-replica-{seat.index}"


def environment(seat: Seat, arguments: Mapping[str, Any], host: Host, band: int | None) -> dict[str, str]:
    """Return what is different in the environment of one replica's processes.

    Raises:
        EngineArgumentRejected: its GPUs are not there.
    """
    made: dict[str, str] = {}
    if (devices := placed(seat, arguments, host)) is not None:
        made[VISIBLE] = ",".join(devices)
    if band is not None:
        made[PORT] = str(band + 1)
    if (root := cache_root(seat, arguments, host)) is not None:
        made[CACHE_ROOT] = root
    return made


def defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a caller's arguments with what they leave open and what follows from them."""
    made: dict[str, Any] = {"enable_prefix_caching": True, **arguments}
    speculative = made.get("speculative_config")
    if isinstance(speculative, Mapping) and speculative.get("num_speculative_tokens") == 0:
        del made["speculative_config"]
    if (chosen := executor(made)) is not None:
        made["distributed_executor_backend"] = chosen
    return made


# -- the length of requests ----------------------------------------------------------------------------------


def spec_clamp(max_tokens: int, prompt_tokens: int, max_model_len: int, lookahead: int) -> int:
    """Return how many tokens a request may make of an engine that drafts `lookahead` tokens ahead, at least one.

    A step drafts before it knows that the request ends, so it needs room for what it may draft, and one more.
    """
    return max(1, min(max_tokens, max_model_len - prompt_tokens - (lookahead + 1)))


def context_cap(max_tokens: int, prompt_tokens: int, max_model_len: int) -> int:
    """Return how many tokens a request may make in what its prompt leaves of the context, at least one."""
    return max(1, min(max_tokens, max_model_len - prompt_tokens))


def request_tokens(max_tokens: int, prompt_tokens: int, max_model_len: int, lookahead: int, *, cap: bool) -> int:
    """Return how many tokens a request may make: `cap` keeps it in the context, a drafter further below."""
    if cap:
        max_tokens = context_cap(max_tokens, prompt_tokens, max_model_len)
    return spec_clamp(max_tokens, prompt_tokens, max_model_len, lookahead) if lookahead else max_tokens


# -- CPUs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Binding:
    """On which CPUs a replica's processes run, by pid; empty with the reason where they run anywhere."""

    cpus: Mapping[int, frozenset[int]] = field(default_factory=dict)
    why_not: str = ""


def bound(
    nodes: Mapping[int, int | None],
    others: Collection[int],
    cpus_of: Mapping[int, frozenset[int]],
    allowed: frozenset[int],
    arguments: Mapping[str, Any],
) -> Binding:
    """Choose CPUs near each process's GPU.

    Args:
        nodes: NUMA node of each worker's GPU, by the worker's pid; None where it is not known.
        others: pids of the replica's processes without a GPU: they run near all its GPUs, if those are in one place.
        cpus_of: CPUs of each NUMA node.
        allowed: CPUs that this process may use: a container's share, or an owner's choice.
        arguments: the engine's.
    """
    if arguments.get("numa_bind"):
        return Binding(why_not="vLLM binds them itself (numa_bind)")
    if len(cpus_of) < 2:
        return Binding(why_not="this machine has one NUMA node")
    known = {pid: node for pid, node in nodes.items() if node is not None and cpus_of.get(node, frozenset()) & allowed}
    if not known:
        return Binding(why_not="no GPU of it has a NUMA node with CPUs that we may use")
    made = {pid: cpus_of[node] & allowed for pid, node in known.items()}
    if len(set(known.values())) == 1 and len(known) == len(nodes):
        made |= dict.fromkeys(set(others) - nodes.keys(), next(iter(made.values())))
    return Binding(made)


def cpu_list(text: str) -> frozenset[int]:
    """Read the kernel's lists, such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
