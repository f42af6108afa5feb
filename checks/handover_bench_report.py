"""What `make bench-handover` found, as tables: on a terminal, and as markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from checks.handover_bench_control import CONTROL, SEGMENTS

TARGET = "bench-handover"
Details = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table."""

    title: str
    columns: Sequence[str]
    """The first one is text, the others are numbers."""
    rows: Sequence[Sequence[str]]

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1), pad_edge=False)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a document."""
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---", *["---:"] * (len(self.columns) - 1)]), *map(_line, self.rows)]
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def sheets(details: Details) -> list[Sheet]:
    """All tables of a run; of one that ended early those that there are."""
    made = (_rates, _costs, _checksums, _small, _control, _overlap, _tpot)
    return [sheet for make in made if (sheet := make(details)) is not None and sheet.rows]


def tables(details: Details) -> list[Table]:
    """For a terminal."""
    return [sheet.table() for sheet in sheets(details)]


def markdown(report: Details) -> str:
    """All tables, under a line that says what they were measured on and what came of it."""
    machine = report["machine"]
    busiest = max(report["others_share"].values(), default=0.0)
    head = (
        f"{machine['num_cores']} cores, {machine['memory_gib']:g} GiB of memory, Linux {machine['kernel']}; "
        f"other processes took at most {busiest:.0%} of the cores. "
        f"Verdict: {report['verdict']}{' (QUICK)' if report['quick'] else ''}."
    )
    missed = [f"- missed: {text}" for text in report["goals_missed"]]
    absent = [f"- {name}: {reason}" for name, reason in report.get("unavailable", {}).items()]
    return "\n\n".join([head, *(["\n".join(missed)] if missed else []), *(sheet.markdown() for sheet in sheets(report)), "\n".join(absent)])


def updated(document: str, text: str, target: str = TARGET) -> str:
    """The document with `text` in place of what stands between the target's two marks. Raises ValueError when it has no such marks."""
    before, begin, rest = document.partition(f"<!-- {target} -->")
    _, end, after = rest.partition(f"<!-- /{target} -->")
    if not begin or not end:
        raise ValueError(f"the document has no marks of {target}")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def _cells(details: Details, *, checksum: bool) -> list[Mapping[str, Any]]:
    return [cell for cell in details.get("transports", []) if cell["checksum"] is checksum]


def _rates(details: Details) -> Sheet | None:
    cells = _cells(details, checksum=False)
    counts = sorted({cell["concurrent"] for cell in cells})
    rows: dict[tuple[str, int], list[str]] = {}
    for cell in cells:
        row = rows.setdefault((cell["transport"], cell["mib"]), ["-"] * len(counts))
        row[counts.index(cell["concurrent"])] = f"{cell['gb_per_s']:.2f} ({cell['ratio']:.2f})"
    columns = ["transport", "MiB", *(f"{count} at a time" for count in counts)]
    title = "GB/s of all hand-overs together (ratio to memcpy of as many bytes)"
    return Sheet(title, columns, [[name, str(mib), *row] for (name, mib), row in rows.items()])


def _costs(details: Details) -> Sheet | None:
    columns = ["transport", "MiB", "GB/s", "best", "memcpy GB/s", "best", "ratio", "ratio to the fastest memcpy", "CPU s/GB decode", "CPU s/GB prefill"]
    rows = [
        [
            cell["transport"],
            str(cell["mib"]),
            *(f"{cell[name]:.2f}" for name in ("gb_per_s", "best_gb_per_s", "memcpy_gb_per_s", "best_memcpy_gb_per_s", "ratio", "ratio_to_fastest")),
            *(f"{cell[name]:.3f}" for name in ("decode_cpu_s_per_gb", "prefill_cpu_s_per_gb")),
        ]
        for cell in _cells(details, checksum=False)
        if cell["concurrent"] == 1
    ]
    return Sheet("One hand-over at a time: rates and what they cost", columns, rows)


def _checksums(details: Details) -> Sheet | None:
    plain = {(cell["transport"], cell["mib"], cell["concurrent"]): cell for cell in _cells(details, checksum=False)}
    rows = []
    for cell in _cells(details, checksum=True):
        without = plain.get((cell["transport"], cell["mib"], cell["concurrent"]))
        if without is not None:
            more = cell["decode_cpu_s_per_gb"] - without["decode_cpu_s_per_gb"]
            slower = 1 - cell["gb_per_s"] / without["gb_per_s"]
            rows.append([cell["transport"], str(cell["mib"]), f"{without['gb_per_s']:.2f}", f"{cell['gb_per_s']:.2f}", f"{slower:.0%}", f"{more:+.3f}"])
    columns = ["transport", "MiB", "GB/s without", "GB/s with", "slower by", "CPU s/GB decode"]
    return Sheet("--kv-checksum: xxh3 of every block, verified by decode (prefill makes its digests before it announces)", columns, rows)


def _small(details: Details) -> Sheet | None:
    keys = ("read_p50_ms", "read_p99_ms", "whole_p50_ms", "whole_p99_ms")
    pairing = details.get("pairing_ms", {})
    rows = [[row["transport"], *(f"{row[key]:.2f}" for key in keys), f"{pairing[row['transport']]:.1f}"] for row in details.get("small", [])]
    columns = ["transport", "read p50", "read p99", "whole p50", "whole p99", "pairing"]
    return Sheet("One block of 2 MiB, without an engine, ms (whole: the Prefill RPC from its start to its end; pairing: three probes included)", columns, rows)


def _control(details: Details) -> Sheet | None:
    paths = details.get("control_path", [])
    rows = [[name, *(f"{path[f'{name}_ms']:.3f}" for path in paths), "yes" if name in CONTROL else "", text] for name, text in SEGMENTS.items()]
    total = ["control path", *(f"{path['control_ms']:.3f}" for path in paths), "", "the median of the sums"]
    floor = [
        "bare conversation",
        *(f"{path['bare_ms']:.3f}" for path in paths),
        "",
        "the same messages by gRPC alone, between the same cores, before and behind",
    ]
    own = ["Tandem's own", *(f"{path['control_ms'] - path['bare_ms']:.3f}" for path in paths), "", "the difference"]
    columns = ["segment", *(path["transport"] for path in paths), "counts", "what"]
    return Sheet("A warm pair's hand-over of 8 MiB, ms (medians)", columns, [*rows, total, floor, own] if paths else [])


def _overlap(details: Details) -> Sheet | None:
    rows = [
        [
            row["transport"],
            str(row["prompt_tokens"]),
            str(row["chunks"]),
            f"{row['kv_mib']:.0f}",
            f"{row['transfer_ms']:.1f}",
            f"{row['hidden_share']:.0%}",
            f"{row['exposed_ms']:.1f}",
        ]
        for row in details.get("overlap", [])
    ]
    return Sheet("Overlap with compute, SmolLM2-135M", ["transport", "prompt tokens", "chunks", "KV MiB", "transfer ms", "hidden", "exposed ms"], rows)


def _tpot(details: Details) -> Sheet | None:
    keys = ("control_tpot_ms", "tpot_during_ms", "ratio_during", "ratio_of_second", "decode_cores_control", "decode_cores", "prefill_cores")
    rows = [
        [row["transport"], f"{row['handover_mib']:.0f}", f"{row['handover_ms']:.0f}", *(f"{row[key]:.2f}" for key in keys), str(row["pairs"])]
        for row in details.get("tpot", [])
    ]
    columns = ["transport", "MiB", "took ms", "TPOT ms without", "during", "ratio", "ratio over 1 s", "decode cores without", "with", "prefill cores", "pairs"]
    return Sheet("Running streams during a hand-over, SmolLM2-135M, 4 streams", columns, rows)
