from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from telemetry import tracing
from telemetry.receiver import OtlpReceiver


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtlpReceiver]:
    """Tracing on, exported over OTLP to the receiver."""
    async with OtlpReceiver() as started:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        tracing.configure_tracing("test", "test-0")
        try:
            yield started
        finally:
            await tracing.shutdown()
