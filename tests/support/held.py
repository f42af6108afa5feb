"""The oracle that ends every test of a cancel or a fault."""

from __future__ import annotations

import asyncio

from engine.async_engine import AsyncEngine
from engine.report import EngineReport


async def assert_nothing_held(*engines: AsyncEngine, within_s: float = 5.0) -> None:
    """Waits until no engine holds a block, a sequence or a reader; fails with what is still held and by whom."""
    for engine in engines:
        report = await engine.report()
        try:
            async with asyncio.timeout(within_s):
                while not report.nothing_held:
                    await asyncio.sleep(0.005)
                    report = await engine.report()
        except TimeoutError:
            raise AssertionError(f"still held: {describe(report)}") from None


def describe(report: EngineReport) -> str:
    """Owners and states of a report."""
    return f"owners={dict(report.owners)} sequences={dict(report.sequences_by_state)} readers={report.num_readers}"
