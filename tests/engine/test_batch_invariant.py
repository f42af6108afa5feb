"""`batch_invariant`: kept where it is promised, refused where it cannot be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checks.tiny_models import VOCAB_SIZE, write_tiny_model
from engine.build import build_engine, build_torch_engine_parts
from engine.config import ConfigError, EngineConfig
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import collect, sampled_tokens

_NUM_TOKENS = 12
_LENGTHS = (1, 15, 16, 17, 40, 90, 33, 64)


def _config(model: Path, kernel_cache: Path, **fields: Any) -> EngineConfig:
    chosen = {"dtype": "bfloat16", "num_blocks": 256, "num_threads": 1, "enable_prefix_caching": False, "batch_invariant": True, **fields}
    return EngineConfig(model, cache_dir=kernel_cache, **chosen)


def _specs() -> list[SequenceSpec]:
    """Every second one sampled, with the log probabilities of what was chosen."""
    prompts = [tuple(random.Random(length).choices(range(3, VOCAB_SIZE), k=length)) for length in _LENGTHS]
    temperatures = [place % 2 * 1.0 for place in range(len(prompts))]
    return [
        SequenceSpec(
            f"s{place}",
            prompt,
            SamplingParams(max_tokens=_NUM_TOKENS, temperature=temperature, seed=place, ignore_eos=True, logprobs=3),
            SequenceKind.LOCAL,
        )
        for place, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]


async def _run(config: EngineConfig, waves: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
    """Tokens of each spec; those of one wave are submitted together, a wave begins when the last one has ended."""
    engine = build_engine(config)
    await engine.start()
    specs = _specs()
    found: dict[int, list[SampledToken]] = {}
    try:
        for wave in waves:
            events = await asyncio.gather(*(collect(engine, specs[place]) for place in wave))
            found.update(zip(wave, map(sampled_tokens, events), strict=True))
    finally:
        await engine.stop()
    return [found[place] for place in range(len(specs))]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
async def test_bfloat16_tokens_and_log_probabilities_are_the_same_alone_and_in_every_batch_and_cut(tmp_path: Path, kernel_cache: Path, family: str) -> None:
    model = write_tiny_model(tmp_path, family, dtype=torch.bfloat16)
    everyone = range(len(_LENGTHS))
    alone = await _run(_config(model, kernel_cache), [[place] for place in everyone])
    assert {len(tokens) for tokens in alone} == {_NUM_TOKENS}
    assert len({tuple(token.token_id for token in tokens) for tokens in alone}) == len(_LENGTHS)
    for budget, waves in (
        (512, [list(everyone)]),
        (19, [list(reversed(everyone))]),
        (1, [list(everyone)]),
        (64, [[5, 0], [1, 2, 3, 4], [7, 6]]),
    ):
        config = _config(model, kernel_cache, max_prefill_tokens_per_step=budget, num_threads=1 + budget % 2)
        assert await _run(config, waves) == alone, f"chunks of {budget}, waves {waves}"


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", {"forward": "module"}, "transformers' module in bfloat16"),
        ("mixtral", {}, "transformers' module in bfloat16"),
        ("llama", {"compiler": "no-such-compiler"}, "no C\\+\\+ compiler 'no-such-compiler'"),
        ("llama", {"attention_backend": "torch", "forward": "module"}, "attention_backend torch"),
    ],
)
def test_what_cannot_promise_it_is_refused_with_the_reason(tmp_path: Path, kernel_cache: Path, family: str, fields: dict[str, Any], reason: str) -> None:
    model = write_tiny_model(tmp_path, family)
    with pytest.raises(ConfigError, match=f"^batch_invariant: .*{reason}"):
        build_torch_engine_parts(_config(model, kernel_cache, **fields))


@pytest.mark.parametrize(("family", "fields"), [("llama", {"dtype": "float32", "forward": "module"}), ("mixtral", {"dtype": "float32"}), ("llama", {})])
def test_what_promises_it_starts_and_says_so(tmp_path: Path, kernel_cache: Path, family: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "engine")
    _, kv_cache, device = build_torch_engine_parts(_config(write_tiny_model(tmp_path, family), kernel_cache, **fields))
    device.close()
    kv_cache.close()
    assert device.batch_invariant
    assert "batch-invariant: True" in caplog.text
