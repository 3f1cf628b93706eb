"""Pitstop's requests in vLLM's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pitstop.engine.errors import InvalidRequest
from pitstop.engine.request import Adapter, FinishReason, Request
from pitstop.engine.vllm_backend.config import request_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}
"""vLLM's finish reasons in Pitstop's words; what is not here is an error."""


def sampling_params(request: Request, max_model_len: int, lookahead: int) -> Any:
    """Return vLLM's `SamplingParams` for a request to an engine that drafts `lookahead` tokens ahead.

    Raises:
        InvalidRequest: vLLM does not accept the combination.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    asked = request.params
    most = request_tokens(
        request.max_tokens, len(request.prompt_token_ids), max_model_len, lookahead, cap=bool(lookahead)
    )
    try:
        return SamplingParams(
            max_tokens=most,
            min_tokens=min(asked.min_tokens, most) if lookahead else asked.min_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=asked.repetition_penalty,
            seed=asked.seed,
            stop=list(asked.stop),
            stop_token_ids=list(asked.stop_token_ids),
            ignore_eos=asked.ignore_eos,
            include_stop_str_in_output=asked.include_stop,
            # 0: the sampled token only.
            logprobs=0 if asked.logprobs else None,
            detokenize=request.text or bool(asked.stop),
            output_kind=RequestOutputKind.DELTA if request.deltas else RequestOutputKind.FINAL_ONLY,
            # This object is the engine's alone: a deep copy of it would cost more than all else here.
            skip_clone=True,
        )
    except Exception as error:
        raise InvalidRequest(f"request {request.request_id}: {error}") from error


def lora_request(adapter: Adapter) -> Any:
    """Return vLLM's name of an adapter. Its prefix cache knows adapters by name and path alone, so both are new."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{adapter.name}@{adapter.number}", adapter.number, adapter.path)


def sampled(token_ids: Sequence[int], positions: Any) -> list[float]:
    """Return the log-probability of each token from vLLM's mapping at its position.

    A step may have more positions than tokens: vLLM before 0.26 hands out all of them again with an empty last delta.
    """
    surplus = len(positions) - len(token_ids)
    if surplus > 0:
        positions = positions[surplus:]
    return [position[token].logprob for token, position in zip(token_ids, positions, strict=True)]


def kept(token_ids: Sequence[int], least: int, stop: str, decode: Callable[[Sequence[int]], str]) -> int:
    """Return how many tokens there are up to the one that completed `stop`; never fewer than `least`."""
    count = len(token_ids)
    while count > max(least, 1) and stop in decode(token_ids[: count - 1]):
        count -= 1
    return count
