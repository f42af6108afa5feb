"""Settings of a prefill worker."""

from __future__ import annotations

from worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Tandem prefill worker: computes prompts' KV caches and holds them while decode workers copy."""
