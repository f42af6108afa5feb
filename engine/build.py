"""Makes a whole engine from a model directory: the one place where scheduler and torch meet."""

from __future__ import annotations

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.facts import ModelFacts
from engine.kv_cache import HostKvCache, KvLayout
from engine.model import LoadedModel, load_model
from engine.pool_size import available_memory_bytes, check_model_len, pool_num_blocks, served_model_len
from engine.torch_device import TorchDevice


def build_engine(config: EngineConfig) -> AsyncEngine:
    """Loads the model, sizes the pool and returns an engine that is not yet started.

    Takes seconds and blocks: call it before a loop serves anybody. Raises ConfigError, ModelError or UnsupportedModelError, all of which a user can cause.
    """
    facts, kv_cache, device = build_torch_engine_parts(config)
    return AsyncEngine(Engine(facts, config.limits, device, num_blocks=kv_cache.num_blocks), kv_cache)


def build_torch_engine_parts(config: EngineConfig) -> tuple[ModelFacts, HostKvCache, TorchDevice]:
    """Loads the model and makes pool and device; takes seconds, so call it off the event loop.

    Raises ModelError, KernelBuildError, or ConfigError with the arithmetic when the pool does not fit memory or a sequence of `max_model_len` the pool.
    """
    model = load_model(config.model, config.dtype, config.device)
    layout = kv_layout(model, config.block_size)
    check_model_len(config, model.max_position_embeddings)
    num_blocks = pool_num_blocks(config, layout, available_memory_bytes())
    max_model_len = served_model_len(config, model.max_position_embeddings, num_blocks)
    kv_cache = HostKvCache(layout, num_blocks)
    facts = ModelFacts(model.name, model.vocab_size, model.eos_token_ids, max_model_len, layout)
    return facts, kv_cache, TorchDevice(config, model, kv_cache)


def kv_layout(model: LoadedModel, block_size: int) -> KvLayout:
    """Layout of a pool for this model."""
    return KvLayout(model.fingerprint, model.dtype_name, model.num_layers, model.num_kv_heads, model.head_dim, block_size)
