"""Which forward a model gets on CPU, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.tiny_models import write_tiny_model
from engine import forward
from engine.build import build_torch_engine_parts
from engine.config import ConfigError, EngineConfig, ForwardName


def _forward(model: Path, kernel_cache: Path, name: ForwardName = "auto", *, batch_invariant: bool = False) -> str:
    config = EngineConfig(
        model, num_blocks=8, max_model_len=64, num_threads=1, cache_dir=kernel_cache, forward=name, dtype="bfloat16", batch_invariant=batch_invariant
    )
    device = build_torch_engine_parts(config)[2]
    device.close()
    return device.forward


def test_the_module_computes_where_native_code_would_be_slower_and_the_log_says_so(
    tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forward, "name_of", lambda isa: "avx2")
    assert _forward(tiny_llama, kernel_cache) == "module"
    assert "native code for this CPU (avx2) is slower" in caplog.text
    assert _forward(tiny_llama, kernel_cache, "native") == "native"
    assert _forward(tiny_llama, kernel_cache, batch_invariant=True) == "native", "nothing else gives that in bfloat16"


def test_a_mixture_of_experts_runs_on_the_module_and_cannot_be_asked_to_run_natively(
    tmp_path: Path, kernel_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_model(tmp_path, "mixtral")
    assert _forward(model, kernel_cache) == "module"
    assert "which the native decoder does not know" in caplog.text
    with pytest.raises(ConfigError, match="forward"):
        _forward(model, kernel_cache, "native")
