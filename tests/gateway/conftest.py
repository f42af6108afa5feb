"""Model directories are made once a session: training a small vocabulary takes some tens of milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway.served_model import ServedModel
from tests.gateway.model_dirs import write_family

FAMILIES = ("smollm2", "qwen3", "llama3", "llama2")


def id_of(backend: Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None
    return token_id


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_family(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def models(model_dirs: dict[str, Path]) -> Iterator[dict[str, ServedModel]]:
    loaded = {family: ServedModel.load(directory) for family, directory in model_dirs.items()}
    yield loaded
    for model in loaded.values():
        model.tokenizer.close()


@pytest.fixture
def model(models: dict[str, ServedModel]) -> ServedModel:
    return models["smollm2"]
