"""Numbers of rows for which a product's bits are the same, row by row."""

from __future__ import annotations

import torch

_ROW_MULTIPLE = 16
"""With MKL a row's bits are the same for every count of rows that is a multiple of this, and not for small odd counts."""


def num_padded(num_rows: int, dtype: torch.dtype) -> int:
    """Rows to compute so that `num_rows` of them have the bits that they have in every batch; float32 alone has such a number."""
    return -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE if dtype == torch.float32 else num_rows


def padded(rows: torch.Tensor) -> torch.Tensor:
    """[rows, ...] with its last row repeated up to `num_padded`; at least one row."""
    missing = num_padded(len(rows), rows.dtype) - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows
