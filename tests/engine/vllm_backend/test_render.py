"""Text to ids and back, with the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitstop.engine.errors import CheckpointUnreadable, InvalidRequest
from pitstop.engine.vllm_backend import TokenizerRenderer
from tests.checkpoints import BOS
from tests.conftest import Checkpoint

pytestmark = pytest.mark.filterwarnings("default")


def test_a_text_gets_one_bos_even_if_it_brings_its_own(checkpoint: Checkpoint) -> None:
    words = TokenizerRenderer(str(checkpoint()))
    plain, own = words.encode("hello"), words.encode("<s>hello")
    assert plain == own
    assert plain.count(BOS) == 1
    assert words.decode(plain) == "hello"
    assert words.encode("") == [BOS]


def test_chat_is_rendered_with_the_models_template(checkpoint: Checkpoint) -> None:
    words = TokenizerRenderer(str(checkpoint()))
    ids = words.chat([{"role": "user", "content": "hello"}])
    assert ids.count(BOS) == 1
    assert words.decode(ids) == "[user]hello[assistant]"


def test_messages_that_the_template_does_not_take_are_the_callers_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidRequest, match="template"):
        TokenizerRenderer(str(checkpoint())).chat([{"role": "user", "content": object()}, 3])  # type: ignore[list-item]


def test_a_model_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="no tokenizer"):
        TokenizerRenderer(str(tmp_path)).encode("hello")
