"""Text to ids and back, with the model's own tokenizer."""

from __future__ import annotations

import shutil
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


def test_messages_for_a_model_without_a_template_are_the_callers_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint(), tmp_path / "checkpoint")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(InvalidRequest, match="chat template"):
        TokenizerRenderer(str(folder)).chat([{"role": "user", "content": "hello"}])


def test_a_model_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="no tokenizer"):
        TokenizerRenderer(str(tmp_path)).encode("hello")
