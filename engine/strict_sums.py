"""MKL's products keep one order of sums in its strict mode only: else it may cut a row's sum among threads, at sizes that go by the number of rows."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

_STRICT = 0x10000
"""MKL_CBWR_STRICT of mkl.h."""
_CURRENT = -1


def ask_for_strict_sums() -> None:
    """For the whole process, unless MKL was told something else; has no effect once MKL has computed or was asked anything. Costs nothing measurable."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # its only public way in: torch has MKL inside and does not pass its functions on


def sums_are_strict() -> bool:
    """Whether the mode is in force; False where torch has no MKL."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    current = getattr(ctypes.CDLL(str(library)), "mkl_serv_cbwr_get", None) if library.is_file() else None
    return current is not None and bool(current(_CURRENT) & _STRICT)
