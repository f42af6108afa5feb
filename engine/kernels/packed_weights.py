"""Weights in the order in which the native kernels read them, all in one allocation of huge pages where the system has them."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt
import torch

from engine.decoder import Linear
from engine.kernels.structures import DTYPE_CODES, CLinear

PANEL = 32
"""Outputs that a kernel computes together: kPanel of linear.h."""
INPUTS = 32
"""Inputs are filled up with zeros to a multiple of this: kInputs of linear.h."""
_LANES = 16
_ALIGNMENT = 64


def num_panels(linear: Linear, *, gated: bool) -> int:
    """Panels of a product; gates and what they gate, half of the outputs each, take turns by 16 in them."""
    return -(-linear.num_outputs // 2 // _LANES) if gated else -(-linear.num_outputs // PANEL)


def padded_inputs(linear: Linear) -> int:
    """Inputs of a packed row, zeros included."""
    return -(-linear.num_inputs // INPUTS) * INPUTS


def panel_bytes(linear: Linear, *, gated: bool = False) -> int:
    """Bytes that a product's panels take, up to the next one's start."""
    num_bytes = num_panels(linear, gated=gated) * PANEL * padded_inputs(linear) * linear.weights[0].element_size()
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class PackedWeights:
    """Panels of several products. Outputs that fill up the last panel are zeros, and so are inputs that fill up a row."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        """`library` is decoder.cpp's."""
        self._pack = library.tandem_pack
        self._pack.argtypes = [ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_int32] * 4, ctypes.c_void_p]
        self._pack.restype = None
        self._memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._used = 0
        self.kept: list[torch.Tensor] = []
        """Biases, which the structures point at."""

    @property
    def num_bytes(self) -> int:
        """What is taken, biases included."""
        return self._used + sum(tensor.nbytes for tensor in self.kept)

    def add(self, linear: Linear, *, gated: bool = False) -> CLinear:
        """Packs one product; where it is `gated` its two halves are a gate and what it gates, of one size. No bias then."""
        assert not (gated and linear.bias is not None), "a gated product has no bias"
        address = self._bytes.ctypes.data + self._used
        self._used += panel_bytes(linear, gated=gated)
        first = 0
        for weight in _halves(linear) if gated else linear.weights:
            turn = (first > 0) if gated else -1
            rows = weight.contiguous()
            self._pack(DTYPE_CODES[rows.dtype], rows.data_ptr(), *rows.shape, first, turn, address)
            first += len(rows)
        return CLinear(address, self._bias(linear), padded_inputs(linear), num_panels(linear, gated=gated))

    def _bias(self, linear: Linear) -> int:
        if linear.bias is None:
            return 0
        bias = torch.zeros(num_panels(linear, gated=False) * PANEL)
        bias[: linear.num_outputs] = linear.bias
        self.kept.append(bias)
        return bias.data_ptr()


def _halves(linear: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one weight that has both, or of two."""
    if len(linear.weights) == 2:
        return linear.weights[0], linear.weights[1]
    gate, up = linear.weights[0].chunk(2)
    return gate, up
