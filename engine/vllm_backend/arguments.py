"""From what the caller asked for to vLLM's engine arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from pitstop.engine.errors import LocalError, hint, names, near
from pitstop.engine.vllm_backend.watch import Carried

EXTENSION: Final = "pitstop.engine.vllm_backend.worker.PitstopWorker"
OURS: Final[Mapping[str, object]] = {
    "worker_extension_cls": EXTENSION,
    # Sampling defaults out of a checkpoint would make other tokens than the trainer asked for.
    "generation_config": "vllm",
    # What the tokens were really drawn from: after temperature and top-p/top-k.
    "logprobs_mode": "processed_logprobs",
}
"""Arguments that Pitstop's guarantees rest on. A caller may repeat them, not change them."""


class EngineArgumentRejected(LocalError, ValueError):
    """Raised when an engine argument is unknown to the installed vLLM, or is not the caller's to set."""

    slug = "engine_argument_rejected"


def engine_arguments(
    model: str, given: Mapping[str, Any], known: Collection[str], carried: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of `AsyncEngineArgs`.

    `carried` goes to the workers.

    Raises:
        EngineArgumentRejected: an argument is unknown (with near matches), or contradicts `OURS`.
    """
    if unknown := [name for name in given if name not in known]:
        raise EngineArgumentRejected(
            f"vLLM has no engine arguments named {names(unknown)}.{hint({n: near(n, list(known)) for n in unknown})}",
            argument=min(unknown),
        )
    _none_of_ours(model, given)
    # Statistics take some percent of the frontend's time. vLLM makes its own spans from them, and only they tell how a
    # drafter does.
    counted = any(given.get(name) is not None for name in ("otlp_traces_endpoint", "speculative_config"))
    defaults = {"disable_log_stats": not counted}
    extra = {**(given.get("additional_config") or {}), "pitstop": Carried(carried)}
    return {**defaults, **given, **OURS, "model": model, "additional_config": extra}


def _none_of_ours(model: str, given: Mapping[str, Any]) -> None:
    for name, value in {**OURS, "model": model}.items():
        if given.get(name, value) != value:
            raise EngineArgumentRejected(f"{name} is {value!r} here, not {given[name]!r}: leave it out", argument=name)
    if given.get("data_parallel_size", 1) != 1:
        raise EngineArgumentRejected(
            "data_parallel_size is 1 here: ask for replicas instead (vLLM answers calls to workers from one rank only)",
            argument="data_parallel_size",
        )
