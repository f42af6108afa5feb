"""Settings of the whole suite: one thread per process, no network, and in CI no skip outside tests/gpu."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

from telemetry import tracing
from telemetry.receiver import OtlpReceiver

# Before torch, tokenizers or a hub client is imported anywhere: two cores are shared by several processes of a test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as load_model asks for, which comes too late where a test has computed something already
os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when Triton is imported, which others than its own tests may do
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_GPU_TESTS = Path(__file__).parent / "gpu"


def _may_skip(path: Path) -> bool:
    """In CI a skipped test is a failed one: what a machine lacks, .ci/run installs."""
    return os.environ.get("CI") != "true" or path.is_relative_to(_GPU_TESTS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not _may_skip(item.path):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and not _may_skip(collector.path):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report


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
