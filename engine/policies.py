"""Whose prompt is computed next, and how much of a step prompts may take. Decoding sequences have their token in every step, whatever the policy.

None of them can starve a prompt: each says after how much other work its turn has come. No clock: work is counted in prompt tokens and steps, so that a run
can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from engine.limits import EngineLimits, PolicyName
from engine.sequence import Sequence

Turn = tuple[float, ...]


class Policy(Protocol):
    """Of one scheduler. Touched by the engine thread only."""

    def turn(self, sequence: Sequence) -> Turn:
        """Called once, when a sequence arrives: smaller computes first. It begins with the priority, which no policy overrules."""

    def budget(self, num_decoding: int) -> int:
        """Called once a step in which prompts wait: prompt tokens that it may compute."""

    def scheduled(self, num_prompt_tokens: int) -> None:
        """Told after each step of what it computes."""


class Fifo:
    """Prompts in the order of their arrival, each step as much as it may."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits

    def turn(self, sequence: Sequence) -> Turn:
        """See Policy."""
        return sequence.order

    def budget(self, num_decoding: int) -> int:
        """See Policy."""
        return self._limits.max_prefill_tokens_per_step

    def scheduled(self, num_prompt_tokens: int) -> None:
        """See Policy."""


class ShortestFirst(Fifo):
    """The shortest prompt first, half-computed longer ones included: short requests do not wait behind long ones.

    Aging: a prompt is overtaken by one that is shorter by d tokens only as long as fewer than d / `prefill_aging` prompt tokens were computed since it came.
    All get older alike, so who comes first is settled when they arrive.
    """

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._num_computed = 0

    def turn(self, sequence: Sequence) -> Turn:
        """See Policy."""
        priority, *arrival = sequence.order
        return (priority, sequence.prefill_target + self._limits.prefill_aging * self._num_computed, *arrival)

    def scheduled(self, num_prompt_tokens: int) -> None:
        """See Policy."""
        self._num_computed += num_prompt_tokens


class Quota(Fifo):
    """In the order of arrival, `prefill_quota` tokens a step while others decode: streams keep a steady pace, first tokens come later."""

    def budget(self, num_decoding: int) -> int:
        """See Policy."""
        return min(self._limits.prefill_quota, super().budget(num_decoding)) if num_decoding else super().budget(num_decoding)


class DecodeFirst(Fifo):
    """Prompts are computed only in steps in which nothing decodes, and after `max_decode_steps` of the others: the evenest streams, the longest wait."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._num_steps_waited = 0

    def budget(self, num_decoding: int) -> int:
        """See Policy."""
        if num_decoding and self._num_steps_waited < self._limits.max_decode_steps:
            self._num_steps_waited += 1
            return 0
        return super().budget(num_decoding)

    def scheduled(self, num_prompt_tokens: int) -> None:
        """See Policy."""
        if num_prompt_tokens:
            self._num_steps_waited = 0


POLICIES: Mapping[PolicyName, Callable[[EngineLimits], Policy]] = {
    "fifo": Fifo,
    "shortest": ShortestFirst,
    "decode-first": DecodeFirst,
    "quota": Quota,
}
