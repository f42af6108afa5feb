"""The native CPU decoder behind ctypes: a whole step in one call, which releases the GIL, over weights packed once into the kernel's own order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import PackedBatch
from engine.decoder import Activation, Decoder, Layer, Linear, Norm
from engine.kernels.build import build_shared_library
from engine.kernels.isa import Isa, name_of
from engine.kernels.packed_weights import PackedWeights, panel_bytes
from engine.kernels.structures import DTYPE_CODES, CDecoder, CLayer, CNorm, CRope, c_batch, c_scores

SOURCE = Path(__file__).with_name("decoder.cpp")

_ACTIVATION_CODES = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}
_LANES = 16


def why_not_native(decoder: Decoder) -> str:
    """What the kernel lacks for this model; empty if nothing."""
    if decoder.head_dim % _LANES:
        return f"head_dim {decoder.head_dim} is not a multiple of {_LANES}"
    if decoder.embedding.dtype not in DTYPE_CODES:
        return f"weights are of type {decoder.embedding.dtype}"
    return ""


class NativeDecoder:
    """A whole decoder on CPU; a row's bits depend on nothing but the row's own sequence. One thread at a time calls it.

    It keeps no memory of the module that was described but an embedding that is not the head's.
    """

    def __init__(self, decoder: Decoder, num_threads: int, cache_dir: Path, compiler: str, isa: Isa = "native") -> None:
        """For a model that `why_not_native` has nothing against; packing takes some 3 s per GB. Raises KernelBuildError."""
        self.isa = name_of(isa)
        """Instructions that it is built for."""
        self.num_threads = num_threads
        self.hidden_size = decoder.embedding.shape[1]
        self.vocab_size = len(decoder.head)
        self._num_heads = decoder.num_heads
        self._library = ctypes.CDLL(str(build_shared_library(SOURCE, cache_dir, compiler, isa)))
        self._declare()
        self._weights = PackedWeights(self._library, sum(panel_bytes(linear, gated=gated) for linear, gated in _products_of(decoder)))
        self._kept: list[object] = []
        structure = self._structure(decoder)
        self._model = self._library.tandem_decoder_new(DTYPE_CODES[decoder.embedding.dtype], ctypes.addressof(structure), num_threads)

    @property
    def num_weight_bytes(self) -> int:
        """Memory that weights take."""
        return self._weights.num_bytes + sum(each.nbytes for each in self._kept if isinstance(each, torch.Tensor))

    def step(self, token_ids: npt.NDArray[np.int32], batch: PackedBatch, rows: npt.NDArray[np.int32], pool: torch.Tensor) -> torch.Tensor:
        """Computes all tokens' keys and values, and the hidden states of tokens `rows`, ascending: [rows, hidden size] float32, final norm included."""
        structure = c_batch(batch, pool, self._num_heads)
        hidden = torch.empty(len(rows), self.hidden_size)
        self._library.tandem_decoder_step(
            self._model, ctypes.addressof(structure), pool.data_ptr(), token_ids.ctypes.data, rows.ctypes.data, len(rows), hidden.data_ptr()
        )
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocabulary], of hidden states, float32 [rows, hidden size]; no cap."""
        logits = torch.empty(len(hidden), self.vocab_size)
        self._library.tandem_decoder_head(self._model, hidden.contiguous().data_ptr(), len(hidden), logits.data_ptr())
        return logits

    def close(self) -> None:
        """Ends the kernel's threads. Idempotent."""
        model, self._model = self._model, None
        if model:
            self._library.tandem_decoder_delete(model)

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self.close()

    def _declare(self) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int32
        for name, arguments, result in (
            ("new", [integer, pointer, integer], pointer),
            ("delete", [pointer], None),
            ("step", [pointer, pointer, pointer, pointer, pointer, integer, pointer], None),
            ("head", [pointer, pointer, integer, pointer], None),
        ):
            function = getattr(self._library, f"tandem_decoder_{name}")
            function.argtypes, function.restype = arguments, result

    def _structure(self, decoder: Decoder) -> CDecoder:
        layers = (CLayer * len(decoder.layers))(*(self._layer(layer) for layer in decoder.layers))
        frequencies = [rope.frequencies.float().contiguous() for rope in decoder.ropes]
        ropes = (CRope * len(decoder.ropes))(*(CRope(each.data_ptr(), len(each), rope.scale) for each, rope in zip(frequencies, decoder.ropes, strict=True)))
        self._kept += [layers, ropes, *frequencies]
        embedding = 0
        if decoder.embedding.data_ptr() != decoder.head.data_ptr():
            rows = decoder.embedding.contiguous()
            self._kept.append(rows)
            embedding = rows.data_ptr()
        return CDecoder(
            ctypes.addressof(layers),
            ctypes.addressof(ropes),
            embedding,
            self._weights.add(Linear((decoder.head,))),
            self._norm(decoder.final_norm),
            decoder.embedding_scale,
            len(layers),
            len(ropes),
            self.hidden_size,
            decoder.layers[0].down.num_inputs,
            decoder.num_heads,
            decoder.num_kv_heads,
            decoder.head_dim,
            self.vocab_size,
            _ACTIVATION_CODES[decoder.activation],
        )

    def _layer(self, layer: Layer) -> CLayer:
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.after_attention, layer.mlp_norm, layer.after_mlp)
        return CLayer(
            *(self._norm(norm) for norm in norms),
            self._weights.add(layer.qkv),
            self._weights.add(layer.output),
            self._weights.add(layer.gate_up, gated=True),
            self._weights.add(layer.down),
            c_scores(layer.scores),
            layer.rope,
        )

    def _norm(self, norm: Norm | None) -> CNorm:
        if norm is None:
            return CNorm()
        weight = norm.weight.float().contiguous()
        self._kept.append(weight)
        return CNorm(weight.data_ptr(), norm.epsilon)


def _products_of(decoder: Decoder) -> Iterator[tuple[Linear, bool]]:
    """Each product, and whether it is gated."""
    for layer in decoder.layers:
        yield from ((layer.qkv, False), (layer.output, False), (layer.gate_up, True), (layer.down, False))
    yield Linear((decoder.head,)), False
