"""The experts of a mixture, as transformers' models call them: expert by expert over the rows that chose it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from engine.rows import padded

EXPERTS_NAME = "tandem_steady"
"""Name in transformers' experts interface."""


def register_steady_experts() -> None:
    """Makes `EXPERTS_NAME` known to transformers; calling it again changes nothing."""
    ExpertsInterface.register(EXPERTS_NAME, _steady_experts)


def _steady_experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """hidden [tokens, hidden size], chosen and weights [tokens, experts per token]; returns [tokens, hidden size].

    A token's bits do not depend on how many others chose its experts: each product has padded rows, and a token's shares are added in its own order of choice.
    """
    shares = hidden.new_empty(*chosen.shape, hidden.shape[-1])
    for expert in sorted({*chosen.flatten().tolist()}):
        tokens, places = torch.where(chosen == expert)
        rows = padded(hidden[tokens])
        inner = experts._apply_gate(torch.nn.functional.linear(rows, experts.gate_up_proj[expert]))
        shares[tokens, places] = torch.nn.functional.linear(inner, experts.down_proj[expert])[: len(tokens)]
    weights = weights.float()
    mixed = shares[:, 0] * weights[:, 0, None]
    for place in range(1, chosen.shape[1]):
        mixed += shares[:, place] * weights[:, place, None]
    return mixed.to(hidden.dtype)
