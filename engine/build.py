"""Makes a whole engine from a model directory: the one place where scheduler and torch meet."""

from __future__ import annotations

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.torch_device import build_torch_engine_parts


def build_engine(config: EngineConfig) -> AsyncEngine:
    """Loads the model, sizes the pool and returns an engine that is not yet started.

    Takes seconds and blocks: call it before a loop serves anybody. Raises ConfigError, ModelError or UnsupportedModelError, all of which a user can cause.
    """
    facts, kv_cache, device = build_torch_engine_parts(config)
    return AsyncEngine(Engine(facts, config.limits, device, num_blocks=kv_cache.num_blocks), kv_cache)
