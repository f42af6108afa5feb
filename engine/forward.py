"""What computes a step's hidden states and logits on CPU: the native decoder where it knows the model, transformers' module else."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import AttentionBackend, PackedBatch, TorchAttention
from engine.config import ConfigError, EngineConfig
from engine.decoder import Decoder
from engine.describe import NotDescribedError, describe_decoder
from engine.kernels.build import default_cache_dir, find_compiler
from engine.kernels.isa import name_of
from engine.kernels.native import NativeAttention, supports_head_dim
from engine.kernels.native_decoder import NativeDecoder, why_not_native
from engine.model import LoadedModel
from engine.strict_sums import sums_are_strict

_log = logging.getLogger(__name__)

_FAST_ISAS = frozenset({"amx", "avx512_bf16", "avx512"})
"""With which the native decoder is faster than the module, as bench-engine shows; with AVX2 a prompt takes many times as long."""


class Forward(Protocol):
    """A model over one pool. Called by the device's thread only."""

    name: str
    """"native" or "module"."""
    attention_backend: str
    """"native" or "torch"."""
    batch_invariant: bool
    """A token's logits have the same bits in every batch, however its prompt was cut."""

    def hidden_states(self, token_ids: npt.NDArray[np.int32], batch: PackedBatch, rows: npt.NDArray[np.int32]) -> torch.Tensor:
        """Computes keys and values of all tokens of a packed batch, and the hidden states of `rows`, ascending: [rows, hidden size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [rows, vocabulary] of at least one row of hidden states."""
        ...


class ModuleForward:
    """transformers' module, its attention replaced."""

    name = "module"

    def __init__(self, model: LoadedModel, attention: AttentionBackend, num_threads: int) -> None:
        """`attention` is over the pool."""
        self._model = model
        self._attention = attention
        self.attention_backend = attention.name
        self.batch_invariant = model.steady and attention.batch_invariant and (num_threads == 1 or sums_are_strict())

    def hidden_states(self, token_ids: npt.NDArray[np.int32], batch: PackedBatch, rows: npt.NDArray[np.int32]) -> torch.Tensor:
        """See Forward."""
        counts = np.diff(batch.chunk_starts)
        positions = np.arange(batch.num_tokens) + np.repeat(batch.first_positions - batch.chunk_starts[:-1], counts)
        self._attention.begin(batch)
        return self._model.hidden_states(token_ids.astype(np.int64), positions.astype(np.int64), self._attention)[torch.from_numpy(rows.astype(np.int64))]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Forward."""
        return self._model.logits(hidden)


class NativeForward:
    """The native decoder over one pool; several pools may share it, one step at a time."""

    name = "native"
    attention_backend = "native"
    batch_invariant = True

    def __init__(self, decoder: NativeDecoder, pool: torch.Tensor, softcap: float | None) -> None:
        """Logits go through `softcap * tanh(logits / softcap)` where it is given."""
        self._decoder = decoder
        self._pool = pool
        self._softcap = softcap

    def hidden_states(self, token_ids: npt.NDArray[np.int32], batch: PackedBatch, rows: npt.NDArray[np.int32]) -> torch.Tensor:
        """See Forward."""
        return self._decoder.step(token_ids, batch, rows, self._pool)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Forward."""
        logits = self._decoder.head(hidden)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def native_decoder(config: EngineConfig, model: LoadedModel) -> NativeDecoder | None:
    """Packs the model's weights for the native decoder; None where the module computes, and a log line says why.

    With `forward` native nothing else will do: raises ConfigError or KernelBuildError then.
    """
    if config.forward == "module" or config.attention_backend == "torch":
        return None
    decoder, reason = _described(model)
    if decoder is None:
        if config.forward == "native":
            raise ConfigError("forward", f"native does not know this model: {reason}")
        _log.warning("the model runs on transformers' module: %s, which the native decoder does not know", reason)
        return None
    if config.forward == "auto" and find_compiler(config.compiler) is None:
        _log.warning("no C++ compiler %r: the model runs on torch, several times slower and not batch-invariant in bfloat16; install g++", config.compiler)
        return None
    if config.forward == "auto" and not config.batch_invariant and name_of("native") not in _FAST_ISAS:
        _log.warning(
            "the model runs on transformers' module: native code for this CPU (%s) is slower, and only batch-invariant; ask for it by forward native",
            name_of("native"),
        )
        return None
    return NativeDecoder(decoder, num_threads_of(config), config.cache_dir or default_cache_dir(), config.compiler)


def num_threads_of(config: EngineConfig) -> int:
    """Threads that compute a step."""
    return config.num_threads or torch.get_num_threads()


def module_forward(config: EngineConfig, model: LoadedModel, pool: torch.Tensor) -> ModuleForward:
    """Raises KernelBuildError when the native attention kernel is asked for and cannot be had, ConfigError when `batch_invariant` is asked for and cannot."""
    forward = ModuleForward(model, _attention_backend(config, pool, model), num_threads_of(config))
    if config.batch_invariant and not forward.batch_invariant:
        raise ConfigError("batch_invariant", f"{_why_variant(model)}, so that sums go by the batch; float32, or a model that forward native knows, gives it")
    return forward


def _described(model: LoadedModel) -> tuple[Decoder, str] | tuple[None, str]:
    """The model, or why there is no native decoder for it."""
    try:
        decoder = describe_decoder(model.module)
    except NotDescribedError as error:
        return None, str(error)
    reason = why_not_native(decoder)
    return (None, reason) if reason else (decoder, "")


def _why_variant(model: LoadedModel) -> str:
    """What of a module with native attention is not batch-invariant."""
    if model.dtype_name != "float32":
        return f"the model runs on transformers' module in {model.dtype_name}"
    if not model.steady:
        return "the model runs on transformers' module with an activation that is not known here"
    return "the model runs on transformers' module in several threads, and MKL is not in its strict mode"


def _attention_backend(config: EngineConfig, pool: torch.Tensor, model: LoadedModel) -> AttentionBackend:
    if config.attention_backend == "torch":
        return TorchAttention(pool)
    reason = _why_no_native_attention(config, model) if config.attention_backend == "auto" else ""
    if reason and config.batch_invariant:
        raise ConfigError("batch_invariant", f"{reason}, and torch's attention sums by the batch")
    if reason:
        _log.warning("%s: attention runs on torch, slower and not batch-invariant", reason)
        return TorchAttention(pool)
    return NativeAttention(pool, model.num_heads, num_threads_of(config), config.cache_dir or default_cache_dir(), config.compiler)


def _why_no_native_attention(config: EngineConfig, model: LoadedModel) -> str:
    """Empty if there is one."""
    if find_compiler(config.compiler) is None:
        return f"no C++ compiler {config.compiler!r} (install one, for instance the package g++)"
    return "" if supports_head_dim(model.head_dim) else f"head_dim {model.head_dim} is not one of the native kernel's"
