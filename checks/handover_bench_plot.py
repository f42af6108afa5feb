"""What `make bench-handover` found, as one picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # a file and no window
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from checks.handover_bench_control import CONFIRM, CONTROL, RESERVE, SEGMENTS

Details = Mapping[str, Any]
_COLOURS = {"shared_memory": "#0b6e99", "nixl": "#c8553d", "nixl_read": "#e0a458", "inline": "#7a8b3c", "cuda_ipc": "#6a4c93"}
_MEMCPY, _INK, _QUIET = "#9aa0a6", "#202124", "#5f6368"
_SEGMENT_COLOURS = ("#0b6e99", "#4f9fbf", "#a6cee3", "#d9d9d9", "#c8553d", "#efefef", "#f7f7f7")
_GOAL_MIB = 64
_DARK = (RESERVE, CONFIRM)
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _QUIET,
    "text.color": _INK,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "legend.frameon": False,
}


def plot(details: Details, path: Path) -> Path:
    """Draws what there is, and returns the picture's path."""
    with pyplot.style.context(STYLE):
        figure, axes = pyplot.subplots(2, 3, figsize=(15, 7.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        machine = details["machine"]
        title = f"Hand-over of KV blocks between two processes, one core each ({machine['num_cores']} cores)"
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        _draw_rates(axes[0][0], details, "concurrent")
        _draw_rates(axes[0][1], details, "mib")
        _draw_costs(axes[0][2], details)
        _draw_control(axes[1][0], details)
        _draw_overlap(axes[1][1], details)
        _draw_tpot(axes[1][2], details)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
    return path


def _plain(details: Details) -> list[Mapping[str, Any]]:
    return [cell for cell in details.get("transports", []) if not cell["checksum"]]


def _draw_rates(axes: Axes, details: Details, by: str) -> None:
    """GB/s by how many hand-overs of 64 MiB run at a time, or by the size of one that runs alone; memcpy of as many bytes beside them."""
    cells = [cell for cell in _plain(details) if (cell["mib"] == _GOAL_MIB if by == "concurrent" else cell["concurrent"] == 1)]
    axes.set_title("Rate, 64 MiB each" if by == "concurrent" else "Rate, one at a time")
    values = sorted({cell[by] for cell in cells})
    places = {value: place for place, value in enumerate(values)}
    memcpy = [[cell["memcpy_gb_per_s"] for cell in cells if cell[by] == value] for value in values]
    if values:
        axes.fill_between(range(len(values)), [min(of) for of in memcpy], [max(of) for of in memcpy], color=_MEMCPY, alpha=0.3, lw=0)
        axes.plot(range(len(values)), [statistics.mean(of) for of in memcpy], color=_MEMCPY, lw=1.5, label="memcpy, one thread")
    for name in dict.fromkeys(cell["transport"] for cell in cells):
        own = [cell for cell in cells if cell["transport"] == name]
        at_goal = next((cell for cell in own if cell["mib"] == _GOAL_MIB and cell["concurrent"] == 1), None)
        label = f"{name} ({at_goal['ratio']:.2f} of memcpy at 64 MiB)" if at_goal and by == "concurrent" else name
        axes.plot([places[cell[by]] for cell in own], [cell["gb_per_s"] for cell in own], "o-", color=_COLOURS[name], lw=2, ms=5, label=label)
    axes.set_xticks(range(len(values)), [str(value) for value in values])
    axes.set_xlabel("hand-overs at the same time" if by == "concurrent" else "MiB of a hand-over")
    axes.set_ylabel("GB/s" + (", all together" if by == "concurrent" else ""))
    axes.set_ylim(0, max((max(cell["gb_per_s"], cell["memcpy_gb_per_s"]) for cell in cells), default=1.0) * 1.45)
    axes.margins(x=0.08)
    axes.legend(loc="upper left", fontsize=8)


def _draw_costs(axes: Axes, details: Details) -> None:
    """CPU seconds a GB at both ends, with and without digests, at 64 MiB."""
    cells = [cell for cell in details.get("transports", []) if cell["mib"] == _GOAL_MIB and cell["concurrent"] == 1]
    axes.set_title("CPU seconds for a GB, 64 MiB hand-overs")
    cells = sorted(cells, key=lambda cell: (list(_COLOURS).index(cell["transport"]), cell["checksum"]), reverse=True)
    labels = [f"{cell['transport']}{' + xxh3' if cell['checksum'] else ''}" for cell in cells]
    decode, prefill = [cell["decode_cpu_s_per_gb"] for cell in cells], [cell["prefill_cpu_s_per_gb"] for cell in cells]
    colours = [_COLOURS[cell["transport"]] for cell in cells]
    axes.barh(labels, decode, color=colours, height=0.6)
    axes.barh(labels, prefill, left=decode, color=colours, alpha=0.45, height=0.6)
    for place, (own, other) in enumerate(zip(decode, prefill, strict=True)):
        axes.annotate(f"{own:.2f} decode + {other:.2f} prefill", (own + other, place), (5, 0), textcoords="offset points", va="center", size=8, color=_QUIET)
    axes.set_xlabel("CPU s/GB (solid: decode, pale: prefill)")
    axes.set_xlim(0, max((a + b for a, b in zip(decode, prefill, strict=True)), default=1) * 1.6)
    axes.tick_params(axis="y", length=0)


def _draw_control(axes: Axes, details: Details) -> None:
    """Where the time of a warm pair goes beside the bytes."""
    paths = list(reversed(details.get("control_path", [])))
    axes.set_title("Control path of a warm pair, ms (medians)")
    colours = dict(zip(SEGMENTS, _SEGMENT_COLOURS, strict=True))
    lefts = [0.0] * len(paths)
    names = [path["transport"] for path in paths]
    for segment in CONTROL:
        widths = [path[f"{segment}_ms"] for path in paths]
        axes.barh(names, widths, left=lefts, color=colours[segment], label=segment, height=0.5)
        for place, (left, width) in enumerate(zip(lefts, widths, strict=True)):
            if width > 0.07 * max(path["control_ms"] for path in paths):
                axes.text(
                    left + width / 2, place, f"{width:.2f}", ha="center", va="center", size=8, color="white" if segment in CONTROL[:1] + CONTROL[3:] else _INK
                )
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, path in enumerate(paths):
        axes.annotate(f"{path['control_ms']:.2f}", (lefts[place], place), (5, 0), textcoords="offset points", va="center", weight="bold", size=9)
    floor = paths[0]["bare_ms"] if paths else 0.0
    for place, (at, text) in enumerate(((floor, "bare gRPC"), (floor + 1.0, "+ 1 ms"))):
        axes.axvline(at, ymin=0.26, color=_INK, lw=1, ls=("--", ":")[place])
        axes.annotate(text, (at, 1.0), (4, -10), xycoords=("data", "axes fraction"), textcoords="offset points", size=8, color=_INK)
    axes.set_xlim(0, max([floor + 1.0, *lefts]) * 1.15)
    axes.set_ylim(-1.2, max(len(paths) - 0.4, 0.8))
    axes.set_xlabel("ms beside the bytes")
    axes.tick_params(axis="y", length=0)
    axes.legend(ncols=2, fontsize=8, loc="lower left")


def _draw_overlap(axes: Axes, details: Details) -> None:
    """When the bytes of a long prompt are on their way: while it is computed, or behind that."""
    rows = list(reversed(details.get("overlap", [])))
    axes.set_title(f"Overlap with compute, {rows[0]['prompt_tokens']:,} tokens" if rows else "Overlap with compute")
    names = [row["transport"] for row in rows]
    hidden = [row["transfer_ms"] * row["hidden_share"] for row in rows]
    rest = [row["transfer_ms"] - own for row, own in zip(rows, hidden, strict=True)]
    colours = [_COLOURS[name] for name in names]
    axes.barh(names, hidden, color=colours, height=0.5)
    axes.barh(names, rest, left=hidden, color=colours, alpha=0.45, height=0.5)
    for place, row in enumerate(rows):
        text = f"{row['hidden_share']:.0%} hidden, {row['exposed_ms']:.1f} ms exposed"
        axes.annotate(text, (row["transfer_ms"], place), (5, 0), textcoords="offset points", va="center", size=8, color=_QUIET)
    axes.set_xlabel("ms of transfer (solid: while the prompt was computed)")
    axes.set_xlim(0, max((row["transfer_ms"] for row in rows), default=1.0) * 1.8)
    axes.set_ylim(-0.8, max(len(rows) - 0.2, 0.8))
    axes.tick_params(axis="y", length=0)


def _draw_tpot(axes: Axes, details: Details) -> None:
    """Gaps of running streams with a hand-over and without one."""
    rows: Sequence[Mapping[str, Any]] = details.get("tpot", [])
    axes.set_title("4 running streams and a hand-over of 512 MiB")
    width = 0.26
    for place, row in enumerate(rows):
        colour = _COLOURS[row["transport"]]
        bars = (
            (-width, "control_tpot_of_second_ms", _MEMCPY, 1.0, ""),
            (0.0, "tpot_of_second_ms", colour, 1.0, f"\n×{row['ratio_of_second']:.2f}"),
            (width, "tpot_during_ms", colour, 0.45, f"\n×{row['ratio_during']:.2f}"),
        )
        for offset, key, fill, alpha, ratio in bars:
            axes.bar(place + offset, row[key], width * 0.94, color=fill, alpha=alpha)
            axes.annotate(f"{row[key]:.0f}{ratio}", (place + offset, row[key]), (0, 3), textcoords="offset points", ha="center", size=8, color=_QUIET)
    axes.set_xticks(range(len(rows)), [f"{row['transport']}\nit took {row['handover_ms']:.0f} ms" for row in rows])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("TPOT, ms")
    axes.set_xlim(-0.7, max(len(rows) - 0.3, 0.7))
    axes.set_ylim(0, max((row["tpot_during_ms"] for row in rows), default=1.0) * 1.5)
    meanings = (("a second without", _MEMCPY, 1.0), ("a second with one", _QUIET, 1.0), ("gaps during it", _QUIET, 0.45))
    axes.legend(handles=[Patch(color=colour, alpha=alpha, label=label) for label, colour, alpha in meanings], loc="upper left", fontsize=8)
