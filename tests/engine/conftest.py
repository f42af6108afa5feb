"""What the tests of the torch part share: compiled kernels are kept for one run of the tests, not in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache directory of compiled kernels."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama of 3 layers, 6 heads over 2 KV heads, tied embeddings."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Qwen3 of 3 layers, with a head of its own and head_dim unlike hidden size / heads."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3")
