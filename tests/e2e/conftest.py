"""One model, one oracle and one stack of three services for the tests that leave the services as they were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from telemetry.receiver import OtlpReceiver
from tests.support.live_stack import LiveStack, live_stack, options_of
from tests.support.reference import Reference, running_reference
from tests.support.served_models import write_served_model


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference(served_model: Path) -> AsyncIterator[Reference]:
    async with running_reference(served_model) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def receiver() -> AsyncIterator[OtlpReceiver]:
    async with OtlpReceiver() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(served_model: Path, receiver: OtlpReceiver) -> AsyncIterator[LiveStack]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_SDK_DISABLED": "false"}
    async with live_stack(options_of(served_model, environment=environment)) as running:
        yield running
        await running.assert_nothing_held()
        running.assert_clean_logs()
