"""One model and one oracle; each module starts the services that it may break."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.reference import Reference, running_reference
from tests.support.served_models import write_served_model


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference(served_model: Path) -> AsyncIterator[Reference]:
    async with running_reference(served_model) as running:
        yield running
