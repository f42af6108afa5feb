"""Activation functions whose bits do not depend on where in a tensor an element lies."""

from __future__ import annotations

import torch
from transformers.activations import SiLUActivation


class SteadySiLU(torch.nn.Module):
    """SiLU from operations that round alike at every place of a tensor; torch's own takes another exponential for the odd elements at a thread's end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise, any shape."""
        return x / torch.exp(-x).add_(1.0)


def steady_activations(module: torch.nn.Module) -> None:
    """Puts steady ones in the place of torch's, in `module` and all below it."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (torch.nn.SiLU, SiLUActivation)):
                setattr(parent, name, SteadySiLU())
