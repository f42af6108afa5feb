"""Prefill's pool in host memory as its sources see it."""

from __future__ import annotations

import xxhash

from engine.kv_cache import HostKvCache
from kvtransfer.memories import HostBlocks


class HostPool:
    """The blocks of a KV cache, the probe's bytes behind them, and the generations of its blocks."""

    def __init__(self, kv_cache: HostKvCache) -> None:
        self.kv_cache = kv_cache
        self.memory = HostBlocks(kv_cache.blocks)
        self.probe_digest = xxhash.xxh3_64_intdigest(kv_cache.probe.data)

    @property
    def probe(self) -> memoryview:
        """Random bytes that any transport may read."""
        return self.kv_cache.probe.data
