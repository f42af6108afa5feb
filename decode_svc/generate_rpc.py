"""What all parts of one Generate RPC work on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.context import Context

from decode_svc.output import Output
from decode_svc.pool import DecodePool
from rpc.deadline import next_hop_s, remaining_s
from telemetry.tracing import current_context


@dataclass(frozen=True, slots=True)
class GenerateRpc:
    """Made in the handler, under its SERVER span."""

    pool: DecodePool
    context: grpc.aio.ServicerContext[Any, Any]
    output: Output
    prefill_instance: str
    """The instance to use first; empty: decode computes the prompt itself."""
    prompt_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while KV of a job's prompt is on its way: samples that resume go one behind the other, and the next one finds the prompt in the prefix cache."""
    trace: Context | None = field(default_factory=current_context)

    @property
    def remaining_s(self) -> float:
        """Seconds left."""
        return remaining_s(self.context, self.pool.max_request_time_s)

    def timeout_s(self) -> float:
        """The timeout of a call of prefill. Raises StatusError DEADLINE_EXCEEDED."""
        return next_hop_s(self.remaining_s, "reserve")

    @property
    def max_recompute_tokens(self) -> int | None:
        """What a preempted sample may cost here; None: there is no other place."""
        return self.pool.policy.max_local_prefill_tokens if len(self.pool.peers) else None
