"""The largest step that a scheduler can plan, run once before the pool is sized: its peak is what activations take.

It has max_num_seqs - 1 decoding sequences, each with a token to sample by every means that there is, and one prompt's chunk for the rest of the token
budget, with a log probability asked for at each of its tokens. It runs over a pool of its own, just large enough: the real one is sized by what it takes.
With the default budget it costs a start some two seconds for a model of 135 million parameters on two cores, and in proportion to the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.limits import EngineLimits
from engine.sampling_params import SamplingParams
from engine.step import Chunk, PromptRow, SampleRow, StepPlan

_EVERYTHING = SamplingParams(
    max_tokens=2,
    min_tokens=1,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
)
_NUM_ALTERNATIVES = 20


class LargestStep:
    """A plan, and the blocks that it needs: `num_blocks` of the pool, from 0 on, each of one sequence."""

    def __init__(self, limits: EngineLimits, *, block_size: int, vocab_size: int, max_positions: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        num_decoding = limits.max_num_seqs - 1
        num_prompt_tokens = min(limits.max_prefill_tokens_per_step, limits.max_num_batched_tokens - num_decoding)
        self.num_blocks = 0
        self._sampling = replace(_EVERYTHING, logprobs=min(_NUM_ALTERNATIVES, vocab_size))
        self.chunks = [self._chunk(1) for _ in range(num_decoding)]
        # A model with fewer positions than the step has tokens computes several prompts at a time.
        self.chunks += [self._chunk(min(max_positions, num_prompt_tokens - first)) for first in range(0, num_prompt_tokens, max_positions)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def plan(self) -> StepPlan:
        """The whole step."""
        return StepPlan(0, self.chunks)

    def first_plan(self) -> StepPlan:
        """One token of it, so that what a device does once (faulting in weights, compiling) is not counted as the step's."""
        return StepPlan(0, self.chunks[:1])

    def _chunk(self, num_tokens: int) -> Chunk:
        token_ids = [position % self._vocab_size for position in range(num_tokens)]
        sample = SampleRow(self._sampling, num_tokens, token_ids, num_tokens)
        prompt = PromptRow(token_ids[1:], min(_NUM_ALTERNATIVES, self._vocab_size)) if num_tokens > 1 else None
        return Chunk(f"profile-{self.num_blocks}", token_ids, 0, tuple(self._blocks_for(num_tokens)), (sample,), prompt)

    def _blocks_for(self, num_tokens: int) -> Iterator[int]:
        for _ in range(-(-num_tokens // self._block_size)):
            yield self.num_blocks
            self.num_blocks += 1
