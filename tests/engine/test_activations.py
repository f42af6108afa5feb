"""An element's activation has the same bits at every place of every tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.activations import ACT2FN

from engine.activations import steady_activations


class _Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.act_fn = ACT2FN[name]


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


VALUES = torch.randn(120_000, generator=torch.Generator().manual_seed(0)) * 4


def _at_other_places(activation: torch.nn.Module) -> list[torch.Tensor]:
    """The same values in parts of several sizes, and as every second element."""
    parts = [torch.cat([activation(part.clone()) for part in torch.split(VALUES, size)]) for size in (31, 4001, 99_999)]
    strided = activation(torch.stack([VALUES, -VALUES], -1)[:, 0])
    return [*parts, strided, activation(torch.stack([VALUES, -VALUES]).view(2, 3, -1)[:, :, :39_999])[0].flatten()]


def _places_agree(activation: torch.nn.Module) -> bool:
    whole = activation(VALUES)
    *full, cut = _at_other_places(activation)
    return all(torch.equal(whole, other) for other in full) and torch.equal(whole.view(3, -1)[:, :39_999].flatten(), cut)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_activations_round_alike_at_every_place_of_a_tensor(name: str, num_threads: int) -> None:
    layer = _Layer(name)
    own = layer.act_fn
    assert steady_activations(layer)
    assert _places_agree(layer.act_fn), f"{num_threads} threads"
    assert torch.allclose(layer.act_fn(VALUES), own(VALUES), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_those_of_torch_do_not(name: str) -> None:
    assert not _places_agree(ACT2FN[name]), "then torch's own could be used"


def test_an_unknown_kind_is_left_alone_and_told() -> None:
    layer = _Layer("mish")
    own = layer.act_fn
    assert not steady_activations(layer)
    assert layer.act_fn is own
