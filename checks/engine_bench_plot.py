"""What bench-engine found, as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # a file and no window
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from checks.handover_bench_plot import STYLE

_QUIET = "#5f6368"


def plot(details: Mapping[str, Any], path: Path) -> Path:
    """Draws and returns the picture's path."""
    machine = details["machine"]
    with pyplot.style.context(STYLE):
        figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        figure.suptitle(f"The engine on {machine['num_cores']} cores, {details['model']['name']} in bfloat16", x=0.01, ha="left", weight="bold", size=13)
        _draw_steps(axes[0], details)
        _draw_limits(axes[1], details)
        _draw_prompts(axes[2], details)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
    return path


def _by_context(axes: Axes, details: Mapping[str, Any], figure: str) -> None:
    contexts = sorted({row["context"] for row in details["steps"]})
    colours = mpl.colormaps["viridis"]
    for index, context in enumerate(contexts):
        rows = [row for row in details["steps"] if row["context"] == context]
        colour = colours(0.85 * index / max(len(contexts) - 1, 1))
        axes.plot([row["batch"] for row in rows], [row[figure] for row in rows], marker="o", ms=4, color=colour, label=f"{context:,}")
    axes.set_xscale("log", base=2)
    batches = sorted({row["batch"] for row in details["steps"]})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("sequences in a step")


def _draw_steps(axes: Axes, details: Mapping[str, Any]) -> None:
    _by_context(axes, details, "ms")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    axes.set_title("Time of a step, ms, by tokens of context")
    axes.legend(title="context", ncols=2)


def _draw_limits(axes: Axes, details: Mapping[str, Any]) -> None:
    _by_context(axes, details, "of_limit")
    axes.axhline(1.0, color=_QUIET, lw=1, ls="--")
    axes.set_ylim(0, 1.1)
    machine = details["machine"]
    axes.set_title(f"Part of the limit: {machine['read_gb_per_s']:g} GB/s, {machine['matmul_gflop_per_s']:,.0f} GFLOP/s")


def _draw_prompts(axes: Axes, details: Mapping[str, Any]) -> None:
    rows = details["prompts"]
    axes.plot([row["tokens"] for row in rows], [row["ms"] for row in rows], marker="o", ms=4, color="#0b6e99")
    for row in rows:
        axes.annotate(f"{row['of_limit']:.0%}", (row["tokens"], row["ms"]), (0, 7), textcoords="offset points", ha="right", size=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row["tokens"] for row in rows], [f"{row['tokens']:,}" for row in rows])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("tokens of the prompt")
    axes.set_title("Time of a prompt, ms, and its part of the limit")
