"""Which of this CPU's instructions native code is built for."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path
from typing import Literal, get_args

_log = logging.getLogger(__name__)

Isa = Literal["native", "amx", "avx512_bf16", "avx512", "avx2", "portable"]
"""What to build for. "native": all that this CPU has; "portable": what every CPU of its kind has."""

ISAS: tuple[Isa, ...] = get_args(Isa)

_WITHOUT_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")))
_CPU_FLAGS: dict[Isa, frozenset[str]] = {
    "amx": frozenset({"amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_bf16": frozenset({"avx512_bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Of x86-64 Linux: a process asks once for the matrix unit's registers."""


def compiler_flags(isa: Isa) -> tuple[str, ...]:
    """For a CPU that has it: see `runs_here`. "native" leaves out a matrix unit that the system does not let this process use."""
    if isa == "native":
        return ("-march=native", *(_WITHOUT_TILES if platform.machine() == "x86_64" and not runs_here("amx") else ()))
    return {
        "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "avx512_bf16": (*_AVX512, "-mavx512bf16"),
        "avx512": _AVX512,
        "avx2": _AVX2,
        "portable": (),
    }[isa]


def runs_here(isa: Isa) -> bool:
    """Whether code built for `isa` runs in this process."""
    if isa in ("native", "portable"):
        return True
    return _CPU_FLAGS[isa] <= cpu_flags() and (isa != "amx" or _may_use_tiles())


def name_of(isa: Isa) -> str:
    """What "native" is here, for people; the name of any other is its own."""
    if isa != "native":
        return isa
    return next((each for each in ("amx", "avx512_bf16", "avx512", "avx2") if runs_here(each)), platform.machine())


@functools.cache
def cpu_flags() -> frozenset[str]:
    """As /proc/cpuinfo has them; empty where it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


@functools.cache
def _may_use_tiles() -> bool:
    """Asks the system, for the whole process; threads that run already are included."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return True
    _log.warning("this CPU has a matrix unit (AMX) that the system does not let this process use (errno %d): bfloat16 runs without it", ctypes.get_errno())
    return False
