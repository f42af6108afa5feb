"""What a start with a real model decides about memory: the bill is told, the pool is what is left, and what cannot fit is refused with the arithmetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine import build
from engine.build import build_torch_engine_parts
from engine.config import ConfigError, EngineConfig
from engine.kv_cache import HostKvCache

_MIB = 1 << 20
_BLOCK_BYTES = 12_288
_PACKED_GATE_AND_UP = 2 * 1008
"""Outputs: they take turns by 16 in panels of 32."""
_PACKED_INNER = 1024
"""Inputs are filled up to a multiple of 32."""
_WEIGHT_BYTES = 4 * (320 * 96 + 3 * (96 * 96 + 2 * 96 * 32 + 96 * 96 + 96 * _PACKED_GATE_AND_UP + 96 * _PACKED_INNER + 2 * 96) + 96)
"""Embeddings, which are tied; per layer q, k and v, o, gate, up and down, and two norms; the last norm. Rope's few frequencies come on top."""


@pytest.fixture
def parts(tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds on a machine of 200 MiB of free memory, 180 of which may be taken, and 128 of them are reserve."""
    monkeypatch.setattr(build, "available_memory_bytes", lambda: 200 * _MIB)

    def run(**config: Any) -> HostKvCache:
        facts, kv_cache, device = build_torch_engine_parts(EngineConfig(tiny_llama, cache_dir=kernel_cache, num_threads=1, **config))
        device.close()
        assert facts.max_model_len == config.get("max_model_len", min(512, kv_cache.num_blocks * 16))
        return kv_cache

    return run


def _told(caplog: pytest.LogCaptureFixture, part: str) -> str:
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"memory: {part}")]
    return re.sub(r" +", " ", line)


def test_the_bill_is_told_line_by_line(parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    parts(num_blocks=1000)
    assert _told(caplog, "weights") == f"memory: weights {_WEIGHT_BYTES / _MIB:.2f} MiB"
    assert re.fullmatch(r"memory: activations [\d.]+ [KM]?i?B peak of the largest step", _told(caplog, "activations"))
    assert _told(caplog, "KV pool") == "memory: KV pool 11.7 MiB 1000 blocks x 12.0 KiB, 16000 tokens"
    assert _told(caplog, "total").endswith("limit 180.0 MiB = 0.9 x 200.0 MiB available")


def test_a_share_of_memory_alone_fills_the_pool(parts: Any) -> None:
    num_blocks = parts(gpu_memory_utilization=0.8).num_blocks
    left = int(160 * _MIB) - 128 * _MIB - _WEIGHT_BYTES
    assert 0 <= left - num_blocks * _BLOCK_BYTES < 24 * _MIB, "all but activations"


def test_bytes_are_rounded_down_to_blocks(parts: Any) -> None:
    assert parts(kv_cache_memory=10 * _BLOCK_BYTES + 1).num_blocks == 10


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"num_blocks": 10**9},
            r"^num_blocks: .*1000000000 blocks x 12\.0 KiB = 11\.2 TiB does not fit: 0\.9 x 200\.0 MiB = 180\.0 MiB less weights 3\.\d\d MiB,",
        ),
        ({"kv_cache_memory": 60 * _MIB}, r"^kv_cache_memory: .*5120 blocks x 12\.0 KiB = 60\.0 MiB does not fit: .* leaves \d+ blocks$"),
        ({"kv_cache_memory": 100}, r"^kv_cache_memory: 100 B hold no block of 12\.0 KiB$"),
        ({"gpu_memory_utilization": 0.1}, r"^gpu_memory_utilization: .* 0\.1 x 200\.0 MiB = 20\.0 MiB less .* leaves 0 blocks"),
        ({"num_blocks": 20, "max_model_len": 400}, r"^max_model_len: 400 tokens do not fit the KV pool: 20 blocks x 16 tokens = 320 tokens$"),
        ({"num_blocks": 64, "max_model_len": 513}, r"^max_model_len: 513 is more than the model's 512$"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_arithmetic(config: dict[str, Any], text: str, parts: Any) -> None:
    with pytest.raises(ConfigError, match=text):
        parts(**config)
