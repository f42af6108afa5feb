"""The native CPU attention kernel behind ctypes: calls release the GIL."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from engine.attention import PackedBatch, Scores
from engine.kernels.build import KernelBuildError, build_shared_library
from engine.kernels.structures import DTYPE_CODES, CBatch, CPacked, CScores, c_batch, c_scores

SOURCE = Path(__file__).with_name("paged_attention.cpp")

_LANES = 16


def supports_head_dim(head_dim: int) -> bool:
    """The kernel works in vectors of 16 elements."""
    return head_dim % _LANES == 0


class NativeAttention:
    """Paged attention in C++; a row's bits depend on nothing but the row's own sequence."""

    name = "native"
    batch_invariant = True

    def __init__(self, pool: torch.Tensor, num_heads: int, num_threads: int, cache_dir: Path, compiler: str) -> None:
        """`pool` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; raises KernelBuildError."""
        head_dim = pool.shape[-1]
        if not supports_head_dim(head_dim):
            raise KernelBuildError(f"head_dim {head_dim} is not a multiple of {_LANES}, which the native kernel needs: set attention_backend to torch")
        self._pool = pool
        self._num_heads = num_heads
        self._num_threads = num_threads
        self._dtype_code = DTYPE_CODES[pool.dtype]
        try:
            library = ctypes.CDLL(str(build_shared_library(SOURCE, cache_dir, compiler)))
        except KernelBuildError as error:
            raise KernelBuildError(f"{error}; or set attention_backend to torch to go without") from error
        self._call = library.tandem_paged_attention
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, *[ctypes.c_void_p] * 4, CScores]
        self._call.restype = ctypes.c_int
        self._batch = CBatch()
        self._arrays: PackedBatch | None = None
        self._tensors = [CPacked() for _ in range(4)]
        self._addresses = [ctypes.addressof(packed) for packed in self._tensors]

    def begin(self, batch: PackedBatch) -> None:
        """Points the kernel at a step's arrays and keeps them until the next step."""
        self._arrays = batch
        self._batch = c_batch(batch, self._pool, self._num_heads)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        """Writes keys and values into the pool and fills `out`; all are [tokens, heads, head_dim] views."""
        for packed, tensor in zip(self._tensors, (query, key, value, out), strict=True):
            if tensor.stride(2) != 1:
                raise ValueError(f"elements of a head must be contiguous, strides are {tensor.stride()}")
            packed.elements, packed.token_stride, packed.head_stride = tensor.data_ptr(), tensor.stride(0), tensor.stride(1)
        batch = ctypes.addressof(self._batch)
        if self._call(batch, self._num_threads, self._pool.data_ptr(), layer, self._dtype_code, *self._addresses, c_scores(scores)):
            raise RuntimeError(f"the native kernel does not know dtype code {self._dtype_code}")
