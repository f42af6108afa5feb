"""How many blocks a KV pool gets, and how long a sequence may be in it: the engine's settings put to the arithmetic of `capacity`."""

from __future__ import annotations

from capacity.memory_bill import DEFAULT_UTILIZATION, MemoryBill, MemoryBudget, MemoryShortageError, PoolWish, bill_of
from engine.config import ConfigError, EngineConfig
from engine.kv_cache import KvLayout

_MODEST_BYTES = 1 << 30
_RESERVE_BYTES = 128 << 20


def check_model_len(config: EngineConfig, max_position_embeddings: int) -> None:
    """Raises ConfigError when the configured length is more than the model has positions for: before a pool is sized by it."""
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise ConfigError("max_model_len", f"{config.max_model_len} is more than the model's {max_position_embeddings}")


def memory_bill(config: EngineConfig, layout: KvLayout, *, available_bytes: int, weight_bytes: int, activation_bytes: int) -> MemoryBill:
    """What the process will take; raises ConfigError with the arithmetic when it does not fit."""
    utilization = DEFAULT_UTILIZATION if config.gpu_memory_utilization is None else config.gpu_memory_utilization
    wish = PoolWish(
        layout.block_bytes,
        layout.block_size,
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_memory,
        modest_bytes=_MODEST_BYTES if config.gpu_memory_utilization is None else None,
        min_tokens=config.max_model_len or 1,
    )
    try:
        return bill_of(MemoryBudget(available_bytes, utilization, weight_bytes, activation_bytes, _RESERVE_BYTES), wish)
    except MemoryShortageError as error:
        raise ConfigError(error.setting, str(error)) from None


def served_model_len(config: EngineConfig, max_position_embeddings: int, num_blocks: int) -> int:
    """Most tokens of a sequence; raises ConfigError when the configured one is more than the pool has room for."""
    num_pool_tokens = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(max_position_embeddings, num_pool_tokens)
    if config.max_model_len > num_pool_tokens:
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} tokens do not fit the KV pool: {num_blocks} blocks x {config.block_size} tokens = {num_pool_tokens} tokens",
        )
    return config.max_model_len
