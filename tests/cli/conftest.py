"""The imported model, where the project's own `make model` puts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.cache_dir import models_dir
from cli.child import SERVICE_MODULES


@pytest.fixture(scope="session")
def model_dir() -> Path:
    directory = models_dir() / "smollm2-135m-instruct"
    if not (directory / "model.safetensors").is_file():
        pytest.skip("no model in the cache folder: make model")
    return directory


@pytest.fixture
def scripted_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted services where `up` and `demo` would start the real ones."""
    for kind in SERVICE_MODULES:
        monkeypatch.setitem(SERVICE_MODULES, kind, "tests.cli.scripted_service")


@pytest.fixture
def empty_model(tmp_path: Path) -> Path:
    """A directory that looks like a model to those who only pass it on."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"
