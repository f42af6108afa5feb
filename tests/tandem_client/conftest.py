"""Each claim of both clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.served_model import ServedModel
from tests.gateway.model_dirs import write_family
from tests.tandem_client.either import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    loaded = ServedModel.load(write_family(tmp_path_factory.mktemp("models") / "smollm2", "smollm2"))
    yield loaded
    loaded.tokenizer.close()
