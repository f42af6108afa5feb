"""The budgets of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["fifo", "shortest", "decode-first", "quota"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one step and one pool may take. Free of torch, so that the simulator can use it."""

    max_num_seqs: int = 64
    """Most sequences that compute or wait for KV at a time."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step."""
    max_prefill_tokens_per_step: int = 512
    """Of which prompt tokens, so that running streams keep their pace."""
    reserve_output_tokens: int = 256
    """Output tokens that a reservation counts for; beyond them a sequence grows block by block and may be preempted."""
    enable_prefix_caching: bool = True
    """Reuse filled blocks of equal prefixes."""
    scheduling_policy: PolicyName = "fifo"
    """Whose prompt comes next, and how much of a step prompts may take; see engine.policies."""
    prefill_quota: int = 128
    """Of quota: prompt tokens of a step while others decode."""
    prefill_aging: float = 1.0
    """Of shortest: tokens that a prompt gains on shorter ones for each prompt token that is computed while it waits."""
    max_decode_steps: int = 64
    """Of decode-first: steps in which prompts wait for those that decode."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens_per_step", "prefill_quota", "max_decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.prefill_aging > 0:
            raise ValueError(f"prefill_aging must be above 0, got {self.prefill_aging}: a prompt could wait for ever")
        if self.reserve_output_tokens < 1:
            raise ValueError(f"reserve_output_tokens must be at least 1, got {self.reserve_output_tokens}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence needs one token a step"
            )
