"""The imported model, where the project's own `make model` puts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.cache_dir import models_dir


@pytest.fixture(scope="session")
def model_dir() -> Path:
    directory = models_dir() / "smollm2-135m-instruct"
    if not (directory / "model.safetensors").is_file():
        pytest.skip("no model in the cache folder: make model")
    return directory
