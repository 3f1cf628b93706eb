"""From what a caller gives as a prompt to ids that are known to fit."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pitstop.engine.errors import InvalidRequest
from pitstop.engine.ports import Renderer
from pitstop.engine.request import Message, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids, and how many tokens may follow them."""

    token_ids: tuple[int, ...]
    max_tokens: int


def render(
    prompt: Prompt, params: SamplingParams, renderer: Renderer | None, max_model_len: int, vocab_size: int
) -> Rendered:
    """Return a prompt's ids and its budget, capped to what the context leaves (0 where it is full).

    Raises:
        InvalidRequest: no ids, more ids than the context holds, ids outside the vocabulary, or text without a
            tokenizer; says which.
    """
    try:
        ids = _ids(prompt, renderer)
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(f"the prompt cannot be rendered: {type(error).__name__}: {error}") from error
    if not ids:
        raise InvalidRequest("the prompt has no tokens")
    if len(ids) > max_model_len:
        raise InvalidRequest(f"the prompt has {len(ids)} tokens, the context {max_model_len}")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    left = max_model_len - len(ids)
    return Rendered(ids, left if params.max_tokens is None else min(params.max_tokens, left))


def _ids(prompt: Prompt, renderer: Renderer | None) -> tuple[int, ...]:
    if isinstance(prompt, Mapping):
        for key in ("prompt_token_ids", "messages", "prompt"):
            if prompt.get(key) is not None:
                return _ids(cast(Prompt, prompt[key]), renderer)
        raise InvalidRequest("a prompt mapping needs prompt_token_ids, messages or prompt")
    if isinstance(prompt, str):
        return tuple(_need(renderer).encode(prompt))
    if isinstance(prompt, bytes | bytearray):
        raise InvalidRequest("a prompt is text, token ids, or chat messages, not bytes")
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return tuple(_need(renderer).chat(cast(Sequence[Message], items)))
    try:
        return tuple(map(operator.index, cast(Sequence[int], items)))
    except (TypeError, ValueError):
        raise InvalidRequest("a prompt is text, token ids, or chat messages, not a mixture") from None


def _need(renderer: Renderer | None) -> Renderer:
    if renderer is None:
        raise InvalidRequest("this engine has no tokenizer: give token ids")
    return renderer
