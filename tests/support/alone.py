"""The oracle: one fake engine that does everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.events import Event, PromptLogprobs
from engine.proto import token_to_proto
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tandem.v1 import generation_pb2
from tests.support.engines import events_alone, fake_parts, token_ids


def sampling_of(params: dict[str, Any]) -> SamplingParams:
    """`params` as of SamplingParams; greedy, and not ended by the model, by default."""
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params)


def alone(prompt: Sequence[int], *, output: Sequence[int] = (), **params: Any) -> list[int]:
    """What it generates as its first sample."""
    return token_ids(_events_alone(prompt, output, params))


def alone_streams(prompt: Sequence[int], **params: Any) -> list[list[int]]:
    """The same, of all samples."""
    events = _events_alone(prompt, (), params)
    return [token_ids(events, index) for index in range(sampling_of(params).n)]


def alone_prompt_logprobs(prompt: Sequence[int], **params: Any) -> list[generation_pb2.TokenLogprob]:
    """Log probabilities of the prompt from one engine."""
    return [token_to_proto(token) for event in _events_alone(prompt, (), params) if isinstance(event, PromptLogprobs) for token in event.logprobs]


def _events_alone(prompt: Sequence[int], output: Sequence[int], params: dict[str, Any]) -> list[Event]:
    return events_alone(fake_parts(num_blocks=256), SequenceSpec("alone", tuple(prompt), sampling_of(params), SequenceKind.LOCAL, tuple(output)))
