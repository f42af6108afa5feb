"""What is shown while a run goes on."""

from __future__ import annotations

import asyncio
import io
from contextlib import suppress

import pytest
from rich.console import Console

from bench import live
from bench.live import LiveView
from bench.progress import Progress
from bench.record import Outcome
from bench.target import Exchange
from tests.bench.records import record


def a_progress() -> Progress:
    progress = Progress(num_planned=10)
    for index in range(5):
        progress.began(index, Exchange())
    progress.ended(record(0, due_s=0.0, at_s=[0.2, 0.3], sent_s=0.001))
    progress.ended(record(1, due_s=0.0, at_s=[0.1]))
    progress.ended(record(2, due_s=0.0, at_s=[0.4]))
    progress.ended(record(3, due_s=0.0, outcome=Outcome.REFUSED))
    progress.out[4].take(0.5, 3)
    return progress


def test_the_line_says_how_far_it_is() -> None:
    progress = a_progress()
    line = LiveView(progress, Console(), "a run").line().plain
    assert line.startswith("a run") and "sent 5/10  running 1  ok 3  refused 1" in line
    assert "TTFT p50 200 ms" in line and "lag <= 1.0 ms" in line
    assert progress.num_tokens == 2 + 1 + 1 + 3


async def test_elsewhere_than_on_a_terminal_it_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LINE_EVERY_S", 0.01)
    written = io.StringIO()
    view = asyncio.create_task(LiveView(a_progress(), Console(file=written), "a run").run())
    async with asyncio.timeout(10):
        while written.getvalue().count("\n") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    view.cancel()
    with suppress(asyncio.CancelledError):
        await view
    assert "\x1b" not in written.getvalue()


async def test_on_a_terminal_one_line_is_drawn_again() -> None:
    written = io.StringIO()
    view = asyncio.create_task(LiveView(a_progress(), Console(file=written, force_terminal=True, width=200), "a run").run())
    async with asyncio.timeout(10):
        while "sent 5/10" not in written.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    view.cancel()
    with suppress(asyncio.CancelledError):
        await view
    assert "\x1b" in written.getvalue()
