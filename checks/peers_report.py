"""What `make bench-peers` found, as tables: on a terminal, and as markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checks.handover_bench_report import Sheet
from checks.peers_results import MAX_OVER_FLOOR, MIN_OVER_TRANSFORMERS, TANDEM, TRANSFORMERS, VLLM

TARGET = "bench-peers"
FIGURES = {"output_tokens_per_s": "output tokens/s", "ttft_ms": "TTFT ms", "batch_tpot_ms": "TPOT ms, all streams generating"}
Details = Mapping[str, Any]


def _spread(series: Mapping[str, Any], digits: int) -> str:
    """Median (min to max); of one round, or where it was the same in all, the median."""
    if series["median"] is None:
        return "-"
    if series["min"] == series["max"]:
        return f"{series['median']:,.{digits}f}"
    return f"{series['median']:,.{digits}f} ({series['min']:,.{digits}f} to {series['max']:,.{digits}f})"


def _median(series: Mapping[str, Any], digits: int) -> str:
    return "-" if series["median"] is None else f"{series['median']:,.{digits}f}"


def sheets(details: Details) -> list[Sheet]:
    """All tables; of a run that ended early those that there are."""
    return [sheet for sheet in (_compared(details), _latencies(details), _limits(details)) if sheet.rows]


def _compared(details: Details) -> Sheet:
    rows = []
    for cell in details.get("cells", []):
        own, other = (_spread(cell["servers"][server][cell["figure"]], 1) for server in (TANDEM, VLLM))
        rows.append([cell["name"], FIGURES[cell["figure"]], own, other, _spread(cell["ratio"], 2), cell["goal"]])
    if (beside := details.get("transformers")) and (cell := _cell(details, beside["cell"])):
        own = _spread(cell["servers"][TANDEM]["output_tokens_per_s"], 1)
        name = f"{cell['name']}, {TRANSFORMERS}"
        ratio = _spread(beside["ratio"], 2)
        rows.append([name, FIGURES["output_tokens_per_s"], own, _spread(beside["output_tokens_per_s"], 1), ratio, f">= {MIN_OVER_TRANSFORMERS:g}"])
    columns = ["load", "figure", "Tandem", "peer", "ratio of pairs", "goal"]
    return Sheet("Beside vLLM and transformers: medians of the rounds (min to max)", columns, rows)


def _cell(details: Details, name: str) -> Mapping[str, Any] | None:
    return next((cell for cell in details.get("cells", []) if cell["name"] == name), None)


def _latencies(details: Details) -> Sheet:
    digits = {"output_tokens_per_s": 0, "ttft_ms": 0, "tpot_ms": 1, "batch_tpot_ms": 1, "seconds": 2, "generator_cores": 2}
    rows = [
        [cell["name"], server, *(_median(found[name], count) for name, count in digits.items())]
        for cell in details.get("cells", [])
        for server, found in cell["servers"].items()
    ]
    columns = ["load", "server", "tokens/s", "TTFT ms", "TPOT ms", "TPOT ms, all generating", "seconds", "generator, cores"]
    return Sheet("All figures: requests' medians, and of the rounds the median", columns, rows)


def _limits(details: Details) -> Sheet:
    rows = []
    for cell in details.get("cells", []):
        floor, of = cell["floor"], cell["of_limit"]
        what = {"ttft_ms": "a prompt", "batch_tpot_ms": "a step"}.get(cell["figure"], "all of it")
        bounds = f"{floor['prompt_ms']:.1f}", f"{floor['step_ms']:.2f} ({floor['step_bound']})"
        rows.append([cell["name"], *bounds, what, f"{floor['figure_ms']:,.1f}", *(f"{of[server]:.0%}" for server in (TANDEM, VLLM))])
    columns = ["load", "a prompt, ms", "a step, ms", "held against it", "floor ms", "Tandem reaches", "vLLM reaches"]
    return Sheet("The machine's floor, and what part of its speed is reached", columns, rows)


def headline(report: Details) -> str:
    """What it was measured on, and how fast that is."""
    machine, limits = report["machine"], report["limits"]
    busiest = max(report["others_share"].values(), default=0.0)
    rounds = f"{report['rounds']} {'round' if report['rounds'] == 1 else 'rounds'}"
    return (
        f"{machine['num_cores']} cores, {machine['memory_gib']:g} GiB of memory, Linux {machine['kernel']}; {report['model']} in bfloat16; "
        f"reading {_spread(limits['read_gb_per_s'], 1)} GB/s, bfloat16 matmul {_spread(limits['matmul_gflop_per_s'], 0)} GFLOP/s; {rounds}; "
        f"other processes took at most {busiest:.0%} of the cores."
    )


def markdown(report: Details) -> str:
    """All tables, what they were measured on, what came of it, and how the servers were started."""
    head = f"{headline(report)} Verdict: {report['verdict']}{' (QUICK)' if report['quick'] else ''}."
    missed = [f"- missed: {text}" for text in report["goals_missed"]]
    floor = report.get("over_floor")
    over = [f"At 32 streams Tandem takes {floor:.2f} times the floor (goal: at most {MAX_OVER_FLOOR:g})."] if floor else []
    peers = [f"- {name} {peer['version']}: `{peer['command']}`" for name, peer in report["peers"].items()]
    loads = [f"- {cell['name']}: {cell['load']}" for cell in report.get("cells", [])]
    parts = [head, "\n".join(missed), *over, *(sheet.markdown() for sheet in sheets(report)), "\n".join(loads), "\n".join(peers)]
    return "\n\n".join(part for part in parts if part)
