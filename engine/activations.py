"""Activation functions whose bits do not depend on where in a tensor an element lies.

torch computes the last elements of each thread's share with other instructions than the rest, and its SiLU and GELUs round otherwise there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

_ATTRIBUTES = ("act_fn", "activation_fn")


class SteadySiLU(torch.nn.Module):
    """SiLU from operations that round alike at every place of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise, any shape."""
        return x / torch.exp(-x).add_(1.0)


class SteadyGELU(torch.nn.Module):
    """GELU by the error function, likewise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise, any shape."""
        return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(x).mul_(0.5)


class SteadyGELUTanh(torch.nn.Module):
    """GELU's approximation by tanh, likewise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise, any shape."""
        inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2.0 / math.pi))
        return torch.tanh(inner).add_(1.0).mul_(x).mul_(0.5)


_STEADY: Mapping[type[torch.nn.Module], Callable[[], torch.nn.Module]] = {
    torch.nn.SiLU: SteadySiLU,
    SiLUActivation: SteadySiLU,
    GELUActivation: SteadyGELU,
    GELUTanh: SteadyGELUTanh,
    NewGELUActivation: SteadyGELUTanh,
    torch.nn.ReLU: torch.nn.ReLU,
}


def steady_activations(module: torch.nn.Module) -> bool:
    """Puts steady ones in the place of torch's, in `module` and all below it. False if one is of a kind that has no steady form here."""
    found = [(parent, name, type(getattr(parent, name))) for parent in module.modules() for name in _ATTRIBUTES if hasattr(parent, name)]
    for parent, name, kind in found:
        if kind in _STEADY:
            setattr(parent, name, _STEADY[kind]())
    return all(kind in _STEADY for _, _, kind in found)
