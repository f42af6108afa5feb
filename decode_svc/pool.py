"""What every RPC of a decode worker works on."""

from __future__ import annotations

from dataclasses import dataclass

from decode_svc.peers import PrefillPeers
from engine.async_engine import AsyncEngine
from kvtransfer.quarantine import Quarantine
from telemetry.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What is tried when a prefill instance fails, and at most how often."""

    max_prefill_attempts: int = 2
    """Prefill instances that are tried, each once, for a prompt."""
    max_local_prefill_tokens: int = 2048
    """Longest prompt that decode computes itself after that."""


class PrefillPace:
    """How long prefill takes here of late, for the decision whether a retry still makes sense."""

    def __init__(self) -> None:
        self._s_per_token = 0.0
        self._queue_s = 0.0

    def saw(self, *, queue_s: float, prefill_s: float, num_tokens: int) -> None:
        """A prompt was computed."""
        if num_tokens:
            self._s_per_token += 0.2 * (prefill_s / num_tokens - self._s_per_token)
            self._queue_s += 0.2 * (queue_s - self._queue_s)

    def predict_s(self, num_tokens: int) -> float:
        """Seconds for a prompt of this many tokens, its queue included; 0 as long as none was seen."""
        return self._queue_s + num_tokens * self._s_per_token


@dataclass(frozen=True, slots=True)
class DecodePool:
    """An engine, the prefill instances it may use, and the policy for their failures."""

    engine: AsyncEngine
    peers: PrefillPeers
    quarantine: Quarantine
    policy: FailurePolicy
    metrics: WorkerMetrics
    pace: PrefillPace
    max_request_time_s: float = 600.0
