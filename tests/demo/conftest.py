"""The demo's own tests: everything on its tiny model, which it makes itself."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(cache: Path) -> Path:
    from pitstop.engine.demo.models import prepare_model

    return prepare_model("tiny", cache)
