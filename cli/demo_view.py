"""How the demo looks: four answers growing side by side, and the table of what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli.generation import Generation
from cli.waterfall import duration_text

_WIDE = 100
"""Columns from which two answers stand side by side."""


@dataclass(slots=True)
class Answer:
    """One prompt, its generation, and what went wrong with it."""

    prompt: str
    generation: Generation
    error: str = ""

    @property
    def path(self) -> str:
        """How the prompt was computed, as the gateway says."""
        return self.generation.path.kind

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache handed over."""
        return self.generation.path.kv_bytes

    @property
    def transport(self) -> str:
        """What carried them; empty when nothing was handed over."""
        return self.generation.path.kv_transport

    def percentile_s(self, percent: float) -> float | None:
        """Of the gaps between messages with tokens, in seconds."""
        gaps = self.generation.gaps_s
        return float(np.percentile(gaps, percent)) if gaps else None


class LiveAnswers:
    """Renders answers as they are now, in as many rows as the terminal has."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = 2 if options.max_width >= _WIDE else 1
        rows = -(-len(self._answers) // columns)
        height = max(3, min(14, (console.size.height - 2) // rows))
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [_panel(answer, options.max_width // columns - 4, height) for answer in self._answers]
        for first in range(0, len(panels), columns):
            grid.add_row(*panels[first : first + columns])
        yield grid


def _panel(answer: Answer, width: int, height: int) -> Panel:
    """The newest lines of an answer, as many as fit."""
    generation = answer.generation
    colour, state = "blue", "waiting for the first token"
    if answer.error:
        colour, state = "red", "failed"
    elif generation.ended is not None:
        colour, state = "green", "done"
    elif generation.first_token is not None:
        colour, state = "cyan", "streaming"
    if generation.num_output_tokens:
        state += f", {generation.num_output_tokens} tokens"
    body = Text(answer.error, "red") if answer.error else Text(generation.text)
    lines = body.wrap(Console(width=width), width)[-(height - 2) :]
    title = Text(answer.prompt.splitlines()[0], "bold", overflow="ellipsis", no_wrap=True)
    title.truncate(width, overflow="ellipsis")
    return Panel(Text("\n").join(lines), title=title, title_align="left", subtitle=state, subtitle_align="right", border_style=colour, height=height)


def summary_table(answers: Sequence[Answer]) -> Table:
    """One row per request, tokens and times as the client saw them; the path and the KV bytes are what the gateway says in its trailing metadata."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("#", "prompt", "cached", "output", "TTFT", "ITL p50", "ITL p99", "tok/s", "KV moved"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("by", "path"):
        table.add_column(name, no_wrap=True)
    for number, answer in enumerate(answers, 1):
        table.add_row(str(number), *_measured(answer), answer.transport or "-", Text("failed", "red") if answer.error else answer.path or "-")
    return table


def _measured(answer: Answer) -> list[str]:
    generation, usage = answer.generation, answer.generation.usage
    times = (generation.ttft_s, answer.percentile_s(50), answer.percentile_s(99))
    rate = generation.tokens_per_s
    return [
        str(usage.prompt_tokens if usage else 0),
        str(usage.cached_tokens if usage else 0),
        str(generation.num_output_tokens),
        *("-" if value is None else duration_text(value) for value in times),
        "-" if rate is None else f"{rate:.1f}",
        f"{answer.kv_bytes / 1e6:.2f} MB" if answer.kv_bytes else "-",
    ]
