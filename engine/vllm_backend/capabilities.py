"""What the installed vLLM can do, found by looking at its engine once. No version numbers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between vLLM's versions.

    Attributes:
        pause: stops the scheduler between steps, keeping requests; the argument asks for the KV cache to be dropped.
        weight_versions: the engine labels its own outputs with a version that `update_weight_version` sets.
        trims_stops: tokens past a stop string are dropped by vLLM when a step makes several.
        invalid: what a request that cannot run raises.
        adds: the keyword names that `add_request` takes.
    """

    pause: Callable[[bool], Awaitable[Any]]
    weight_versions: bool
    trims_stops: bool
    invalid: tuple[type[Exception], ...]
    adds: frozenset[str]


def probe(llm: Any) -> Capabilities:
    """Look at an `AsyncLLM`."""
    return Capabilities(
        pause=_pause(llm),
        weight_versions=hasattr(llm, "update_weight_version"),
        trims_stops=hasattr(llm.output_processor, "_trim_surplus_tokens"),
        invalid=_invalid(),
        adds=frozenset(inspect.signature(llm.add_request).parameters),
    )


def refits_beneath_adapters() -> bool:
    """Say whether layers that adapters run on can be loaded anew: in older versions they have no way in for weights."""
    from vllm.lora.layers.base import BaseLayerWithLoRA

    return hasattr(BaseLayerWithLoRA, "load_weights")


def _pause(llm: Any) -> Callable[[bool], Awaitable[Any]]:
    # The core's own calls: `pause_generation` adds a fixed sleep of 20 ms to let outputs arrive, which is no proof that
    # they have.
    for name in ("pause_scheduler_async", "pause_generation_async"):
        if (call := getattr(llm.engine_core, name, None)) is not None:
            return lambda clear, call=call: call("keep", clear)  # type: ignore[misc]
    return lambda clear: llm.pause_generation(mode="keep", clear_cache=clear)


def _invalid() -> tuple[type[Exception], ...]:
    from vllm import exceptions

    client = getattr(exceptions, "VLLMClientError", None)
    return (ValueError, TypeError) if client is None else (ValueError, TypeError, client)
