"""A run while it goes on: one line that is drawn again on a terminal, and one every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bench.progress import Progress
from bench.record import Outcome

_REDRAW_S: Final = 0.5
"""Drawing takes the generator's time: about a tenth of a millisecond each."""
_LINE_EVERY_S: Final = 5.0
_RATE_OVER_S: Final = 5.0


class LiveView:
    """Shows a Progress until `run` is cancelled."""

    def __init__(self, progress: Progress, console: Console, label: str) -> None:
        self._progress = progress
        self._console = console
        self._label = label
        self._begun_s = time.monotonic()
        self._tokens: list[tuple[float, int]] = []

    async def run(self) -> None:
        """Until it is cancelled; the last state stays on the screen."""
        if not self._console.is_terminal:
            await self._print_lines()
            return
        with Live(Text(), console=self._console, auto_refresh=False, transient=False) as live:
            try:
                while True:
                    live.update(self.line(), refresh=True)
                    await asyncio.sleep(_REDRAW_S)
            finally:
                live.update(self.line(), refresh=True)

    async def _print_lines(self) -> None:
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(_LINE_EVERY_S)
                self._console.print(self.line(), soft_wrap=True)

    def line(self) -> Text:
        """The state in one line."""
        progress, now = self._progress, time.monotonic() - self._begun_s
        outcomes = progress.outcomes
        parts = [f"{now:4.0f} s", f"sent {progress.num_sent}/{progress.num_planned}", f"running {len(progress.out)}", f"ok {outcomes[Outcome.OK]}"]
        parts += [f"{outcome.value} {outcomes[outcome]}" for outcome in Outcome if outcome is not Outcome.OK and outcomes[outcome]]
        parts.append(f"{self._tokens_per_s(now):.0f} tokens/s")
        if progress.ttft_p50_s is not None:
            parts.append(f"TTFT p50 {progress.ttft_p50_s * 1e3:.0f} ms")
        parts.append(f"lag <= {progress.worst_lag_s * 1e3:.1f} ms")
        return Text(f"{self._label}  " + "  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _tokens_per_s(self, now: float) -> float:
        self._tokens.append((now, self._progress.num_tokens))
        while len(self._tokens) > 2 and now - self._tokens[0][0] > _RATE_OVER_S:
            del self._tokens[0]
        (then, before), (_, tokens) = self._tokens[0], self._tokens[-1]
        return (tokens - before) / (now - then) if now > then else 0.0
