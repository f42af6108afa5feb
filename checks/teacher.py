"""Teacher forcing: what transformers' own model, in bfloat16 and over the whole sequence at once, says of tokens that another run has chosen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from checks.client import Completion
from tandem.v1 import gateway_pb2


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a run stays from the reference."""

    num_positions: int
    mean_error: float
    """Mean of |log probability - the reference's| of the chosen token, in nats."""
    p99_error: float
    max_error: float
    num_clear: int
    """Positions in which the reference's first and second token are further apart than the gap."""
    same_top: float
    """Part of those in which both have the same first token."""

    def as_dict(self) -> dict[str, object]:
        """For the report's file."""
        return asdict(self)

    def __str__(self) -> str:
        errors = f"logprob error mean {self.mean_error:.4f} p99 {self.p99_error:.3f} max {self.max_error:.3f}"
        return f"{self.num_positions} positions, {errors}; same top token in {self.same_top:.4f} of {self.num_clear} clear ones"


@torch.inference_mode()
def agreement(model: Path, asked: list[gateway_pb2.GenerateRequest], completions: list[Completion], *, min_gap: float) -> Agreement:
    """Compares every output position of every completion that asked for `logprobs`."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True, attn_implementation="sdpa").eval()
    head = reference.lm_head.weight.float()
    errors: list[float] = []
    clear: list[bool] = []
    for request, completion in zip(asked, completions, strict=True):
        chosen = list(completion.token_ids)
        if not chosen:
            continue
        ids = torch.tensor([[*request.token_ids.ids, *chosen[:-1]]])
        hidden = reference.model(input_ids=ids, use_cache=False).last_hidden_state[0, -len(chosen) :].float()
        logprobs = torch.log_softmax(hidden @ head.T, -1)
        best = logprobs.topk(2, -1)
        for row, (token, told) in enumerate(zip(chosen, completion.logprobs, strict=True)):
            errors.append(abs(float(logprobs[row, token]) - told.logprob))
            if float(best.values[row, 0] - best.values[row, 1]) > min_gap:
                clear.append(told.top_logprobs[0].token_id == int(best.indices[row, 0]))
    all_errors = torch.tensor(errors)
    return Agreement(
        len(errors), float(all_errors.mean()), float(all_errors.quantile(0.99)), float(all_errors.max()), len(clear), sum(clear) / max(1, len(clear))
    )
