"""What `make bench-peers` found, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # a file and no window
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from checks.handover_bench_plot import STYLE
from checks.peers_report import headline
from checks.peers_results import GRPC, TANDEM, TRANSFORMERS, VLLM

Details = Mapping[str, Any]
_COLOURS = {TANDEM: "#0b6e99", GRPC: "#8fc1d6", VLLM: "#c8553d", TRANSFORMERS: "#7a8b3c"}
_LATENCY = {"ttft_ms": "TTFT", "batch_tpot_ms": "TPOT"}
_QUIET = "#5f6368"
_WIDTH = 0.8


def plot(details: Details, path: Path) -> Path:
    """Draws what there is, and returns the picture's path."""
    latencies = [cell for cell in details.get("cells", []) if cell["figure"] in _LATENCY and cell["ratio"]["median"] is not None]
    with pyplot.style.context(STYLE):
        widths = (1.4, *(0.5 for _ in latencies), 1.1)
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure, axes = pyplot.subplots(1, len(widths), figsize=(15, 4.8), layout=layout, width_ratios=widths)
        figure.suptitle("Tandem beside its peers, one machine, the same requests by turns", x=0.01, ha="left", weight="bold", size=13)
        figure.supxlabel(headline(details), x=0.01, ha="left", size=8, color=_QUIET)
        _draw_rates(axes[0], details)
        for each, cell in zip(axes[1:], latencies, strict=False):
            _draw_latency(each, cell)
        _draw_limits(axes[-1], details)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
    return path


def _bars(axes: Axes, groups: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]], digits: int) -> None:
    """For each group a bar for each server: the median, its whisker from min to max."""
    labelled = set()
    for place, (_, servers) in enumerate(groups):
        width = _WIDTH / len(servers)
        for index, (server, series) in enumerate(servers.items()):
            at = place + (index - (len(servers) - 1) / 2) * width
            label = None if server in labelled else server
            labelled.add(server)
            axes.bar(at, series["median"], width * 0.92, color=_COLOURS[server], label=label)
            whisker = [[series["median"] - series["min"]], [series["max"] - series["median"]]]
            axes.errorbar(at, series["median"], yerr=whisker, color="#202124", lw=1, capsize=2)
            axes.annotate(f"{series['median']:,.{digits}f}", (at, series["max"]), (0, 3), textcoords="offset points", ha="center", size=8)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.18)


def _named(cell: Mapping[str, Any]) -> str:
    return f"{cell['name']}\n{cell['ratio']['median']:.2f}x vLLM ({cell['goal']})"


def _draw_rates(axes: Axes, details: Details) -> None:
    axes.set_title("Output tokens/s, 256 in, 64 out")
    beside = details.get("transformers")
    groups = []
    for cell in details.get("cells", []):
        if cell["figure"] == "output_tokens_per_s":
            servers = {server: found[cell["figure"]] for server, found in cell["servers"].items()}
            if beside and beside["cell"] == cell["name"]:
                servers[TRANSFORMERS] = beside["output_tokens_per_s"]
            groups.append((_named(cell), {name: servers[name] for name in _COLOURS if name in servers}))
    _bars(axes, groups, 0)
    axes.legend(loc="upper left", fontsize=8)


def _draw_latency(axes: Axes, cell: Mapping[str, Any]) -> None:
    axes.set_title(f"{_LATENCY[cell['figure']]}, ms")
    _bars(axes, [(_named(cell), {server: cell["servers"][server][cell["figure"]] for server in (TANDEM, VLLM)})], 1)


def _draw_limits(axes: Axes, details: Details) -> None:
    axes.set_title("Part of the machine's limit")
    cells = list(reversed(details.get("cells", [])))
    height = _WIDTH / 2
    for side, server in enumerate((VLLM, TANDEM)):
        values = [cell["of_limit"][server] for cell in cells]
        places = [place + (side - 0.5) * height for place in range(len(cells))]
        axes.barh(places, values, height * 0.92, color=_COLOURS[server])
        for at, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.0%}", (value, at), (4, 0), textcoords="offset points", va="center", size=8)
    axes.set_yticks(range(len(cells)), [cell["name"] for cell in cells])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0))
    axes.set_xlim(0, max([1.0, *(value for cell in cells for value in cell["of_limit"].values())]) * 1.08)
    axes.axvline(1.0, color=_QUIET, lw=1, ls="--")
