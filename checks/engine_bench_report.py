"""What bench-engine found, as tables for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Details = Mapping[str, Any]
Sheet = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A title, heads and rows."""


def sheets(details: Details) -> list[Sheet]:
    """All tables."""
    made = [_steps(details), _prompts(details), _memory(details)]
    return [*made, _compared(details)] if details["compared"] else made


def tables(details: Details) -> list[Table]:
    """For a terminal."""
    made = []
    for title, heads, rows in sheets(details):
        table = Table(*heads, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        made.append(table)
    return made


def markdown(details: Details) -> str:
    """For a document."""
    machine, startup = details["machine"], details["startup"]
    lines = [
        f"{machine['num_cores']} cores ({machine['isa']}), reading {machine['read_gb_per_s']} GB/s, products in bfloat16 "
        f"{machine['matmul_gflop_per_s']:,.0f} GFLOP/s. "
        f"Before the first step: loading {startup['load_s']} s, packing {startup['pack_s']} s, compiling {startup['compile_s']} s once a machine."
    ]
    for title, heads, rows in sheets(details):
        lines += ["", f"{title}:", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _steps(details: Details) -> Sheet:
    contexts = sorted({row["context"] for row in details["steps"]})
    found = {(row["batch"], row["context"]): f"{row['ms']:.1f} ({row['of_limit']:.2f})" for row in details["steps"]}
    batches = sorted({batch for batch, _ in found})
    heads = ["batch", *(f"context {context:,}" for context in contexts)]
    return "A step, ms (part of the machine's limit)", heads, [[str(batch), *(found.get((batch, context), "-") for context in contexts)] for batch in batches]


def _prompts(details: Details) -> Sheet:
    rows = [[f"{row['tokens']:,}", f"{row['ms']:,.0f}", f"{row['gflop_per_s']:,.0f}", f"{row['of_limit']:.2f}"] for row in details["prompts"]]
    return f"A prompt, in chunks of {details['model']['prefill_chunk']}", ["tokens", "ms", "GFLOP/s", "of the machine's"], rows


def _memory(details: Details) -> Sheet:
    model = details["model"]
    contexts = sorted({row["context"] for row in details["steps"]})
    rows = [[f"{context:,}", f"{context * model['kv_bytes_a_token'] / 1e6:,.1f}"] for context in contexts]
    return f"Memory of a sequence (weights take {model['packed_mb']:,.0f} MB once)", ["context", "KV, MB"], rows


def _compared(details: Details) -> Sheet:
    names = ("forward", "step_1_ms", "step_8_ms", "prompt_256_ms", "batch_invariant")
    heads = ("forward", "1 stream, ms", "8 streams, ms", "prompt of 256, ms", "batch-invariant")
    return "The same by other code (context 300)", heads, [[str(row[name]) for name in names] for row in details["compared"]]
