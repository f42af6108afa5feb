"""The native part of a draw behind ctypes: which few of all tokens may win it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.kernels.build import build_shared_library
from engine.kernels.isa import Isa
from engine.noise import RowKey

SOURCE = Path(__file__).with_name("sampling.cpp")

_CAPACITY, _LANES = 1024, 16
_LEAST_TEMPERATURE = 1e-4
"""Below it a float32's error in a score could be more than the bounds allow for."""


class NativeSampling:
    """One thread at a time calls it; calls hold the GIL, since they take some 20 microseconds."""

    def __init__(self, cache_dir: Path, compiler: str, isa: Isa = "native") -> None:
        """Raises KernelBuildError."""
        library = ctypes.PyDLL(str(build_shared_library(SOURCE, cache_dir, compiler, isa)))
        self._call = library.tandem_candidates
        self._call.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_float,
            ctypes.c_float,
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._call.restype = ctypes.c_int32
        self._ids = np.empty(_CAPACITY, np.int32)
        self._scratch = np.empty(0, np.float32)

    def candidates(self, logits: npt.NDArray[np.float32], highest: float, temperature: float, key: RowKey) -> list[int] | None:
        """Ids of all tokens that may win a draw from one row without gaps, and of a few others; None where it cannot tell. `highest` is the greatest logit."""
        if temperature < _LEAST_TEMPERATURE:
            return None
        if len(self._scratch) < len(logits) + _LANES:
            self._scratch = np.empty(len(logits) + _LANES, np.float32)
        addresses = (self._ids.ctypes.data, self._scratch.ctypes.data)
        count = self._call(logits.ctypes.data, len(logits), highest, 1.0 / temperature, key.mask, key.offset, _CAPACITY, *addresses)
        return self._ids[:count].tolist() if count <= _CAPACITY else None
