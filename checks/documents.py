"""What a check found, for a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def rows_as_markdown(rows: Sequence[Mapping[str, object]], *, code: str = "") -> str:
    """A table of rows with the same names, which become its heads; those of the column `code` stand in quotes."""
    heads = list(rows[0])
    lines = [f"| {' | '.join(head.replace('_', ' ') for head in heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(f'`{row[head]}`' if head == code else str(row[head]) for head in heads)} |" for row in rows]
    return "\n".join(lines)
