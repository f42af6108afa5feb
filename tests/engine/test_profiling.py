"""The step that is profiled is as large as a scheduler may plan one, over blocks that no two sequences share."""

from __future__ import annotations

from typing import Any

import pytest

from engine.limits import EngineLimits
from engine.profiling import LargestStep


def _step(max_positions: int = 8192, **limits: Any) -> LargestStep:
    return LargestStep(EngineLimits(**limits), block_size=16, vocab_size=320, max_positions=max_positions)


@pytest.mark.parametrize(
    ("limits", "num_decoding", "num_prompt_tokens"),
    [
        ({}, 63, 512),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_prefill_tokens_per_step": 64}, 7, 57),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_prefill_tokens_per_step": 8}, 7, 1),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 40, "max_prefill_tokens_per_step": 40}, 0, 40),
    ],
)
def test_the_step_is_filled_to_the_token_budget(limits: dict[str, int], num_decoding: int, num_prompt_tokens: int) -> None:
    step = _step(**limits)
    assert [len(chunk.token_ids) for chunk in step.chunks] == [1] * num_decoding + [num_prompt_tokens]
    assert step.num_tokens == num_decoding + num_prompt_tokens
    assert all(len(chunk.samples) == 1 for chunk in step.chunks)


def test_every_sequence_has_blocks_of_its_own_for_all_its_tokens() -> None:
    step = _step()
    tables = [chunk.block_table for chunk in step.chunks]
    assert sorted(block for table in tables for block in table) == list(range(step.num_blocks))
    assert all(len(table) * 16 >= len(chunk.token_ids) for table, chunk in zip(tables, step.chunks, strict=True))


def test_a_prompt_asks_for_the_log_probabilities_that_it_may() -> None:
    prompt = _step().chunks[-1].prompt
    assert prompt is not None
    assert (len(prompt.target_token_ids), prompt.num_alternatives) == (511, 20)


def test_a_model_with_few_positions_gets_several_prompts() -> None:
    step = _step(max_positions=200)
    assert [len(chunk.token_ids) for chunk in step.chunks[63:]] == [200, 200, 112]
    assert step.num_tokens == 575
    assert all(token_id < 320 for chunk in step.chunks for token_id in chunk.token_ids)


def test_the_first_plan_is_one_token() -> None:
    assert [len(chunk.token_ids) for chunk in _step().first_plan().chunks] == [1]
