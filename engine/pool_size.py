"""How many blocks a KV pool gets, and how long a sequence may be in it."""

from __future__ import annotations

from pathlib import Path

from engine.config import ConfigError, EngineConfig
from engine.kv_cache import KvLayout

_GIB = 1 << 30
_DEFAULT_POOL_BYTES = _GIB


def check_model_len(config: EngineConfig, max_position_embeddings: int) -> None:
    """Raises ConfigError when the configured length is more than the model has positions for: before a pool is sized by it."""
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise ConfigError("max_model_len", f"{config.max_model_len} is more than the model's {max_position_embeddings}")


def pool_num_blocks(config: EngineConfig, layout: KvLayout, available_bytes: int) -> int:
    """Blocks of the pool; raises ConfigError when they do not fit `available_bytes` or are none."""
    field = "num_blocks" if config.num_blocks is not None else "kv_cache_memory_bytes"
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // layout.block_bytes
    else:
        num_blocks = max(_DEFAULT_POOL_BYTES // layout.block_bytes, -(-(config.max_model_len or 1) // config.block_size))
    if num_blocks < 1:
        raise ConfigError(field, f"{config.kv_cache_memory_bytes} bytes hold no block of {layout.block_bytes} bytes")
    needed_bytes = num_blocks * layout.block_bytes
    if needed_bytes > available_bytes:
        raise ConfigError(
            field,
            f"the KV pool is too large: {num_blocks} blocks x {layout.block_bytes} bytes = {needed_bytes / _GIB:.2f} GiB"
            f" against {available_bytes / _GIB:.2f} GiB of available memory",
        )
    return num_blocks


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


def available_memory_bytes() -> int:
    """MemAvailable of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")
