"""One tensor for weights that are used together, in the memory of which the module's own parts then lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from engine.decoder import Decoder, Layer, Linear


def fuse_weights(decoder: Decoder) -> Decoder:
    """The same model with one weight for each product, and biases in the weights' type.

    Parts are copied product by product, and each becomes a view of the copy as soon as it is made, in the module that was described too: no second copy stays.
    """
    return replace(decoder, layers=tuple(_fused_layer(layer) for layer in decoder.layers))


def products_of(layer: Layer) -> Iterator[Linear]:
    """In the order in which they are computed."""
    yield from (layer.qkv, layer.output, layer.gate_up, layer.down)


def weight_bytes(decoder: Decoder) -> int:
    """Memory that embedding, head and products take, tied ones once; norms are not counted."""
    weights = [decoder.embedding, decoder.head, *(weight for layer in decoder.layers for product in products_of(layer) for weight in product.weights)]
    return sum(weight.nbytes for weight in {weight.data_ptr(): weight for weight in weights}.values())


def _fused_layer(layer: Layer) -> Layer:
    qkv, output, gate_up, down = (_fused(product) for product in products_of(layer))
    return replace(layer, qkv=qkv, output=output, gate_up=gate_up, down=down)


def _fused(product: Linear) -> Linear:
    parts = product.weights
    bias = None if product.bias is None else product.bias.to(parts[0])
    if len(parts) == 1:
        return Linear((parts[0].detach(),), bias)
    whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = rows
    return Linear((whole,), bias)
