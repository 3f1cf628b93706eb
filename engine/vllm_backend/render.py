"""The `Renderer` port on the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pitstop.engine.errors import CheckpointUnreadable, InvalidRequest
from pitstop.engine.request import Message


class TokenizerRenderer:
    """Renders with the tokenizer that transformers finds for a model. It is loaded at the first use."""

    def __init__(self, model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
        self._model, self._revision, self._trust = str(model), revision, trust_remote_code

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            CheckpointUnreadable: the model has none.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._model, revision=self._revision, trust_remote_code=self._trust)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointUnreadable(f"{self._model} has no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Tokenize text. A text that begins with the BOS itself gets no second one."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=True)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Render chat messages with the model's template, ready for the assistant's turn.

        Raises:
            InvalidRequest: the model has no template, or it does not take these messages.
        """
        try:
            # As text first: a template writes its BOS itself, and the tokenizer would add another.
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise InvalidRequest(f"the chat template of {self._model} does not take the messages: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
