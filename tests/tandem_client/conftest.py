"""Each claim of both clients; one stack of real services for the tests that leave it as it was."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.served_model import ServedModel
from tests.gateway.model_dirs import write_family
from tests.support.live_stack import LiveStack, live_stack, options_of
from tests.support.served_models import write_served_model
from tests.tandem_client.certificates import write_certificates
from tests.tandem_client.either import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    loaded = ServedModel.load(write_family(tmp_path_factory.mktemp("models") / "smollm2", "smollm2"))
    yield loaded
    loaded.tokenizer.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    return write_certificates(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveStack]:
    async with live_stack(options_of(write_served_model(tmp_path_factory.mktemp("model")))) as running:
        yield running
        await running.assert_nothing_held()
        running.assert_clean_logs()
