"""A Generate request, checked."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from engine.facts import ModelFacts
from engine.limits import EngineLimits
from engine.proto import sampling_params_from_proto, sampling_params_to_proto, token_ids_from_proto
from engine.sampling_params import Finish, SampledToken, SamplingParams, finish_of
from engine.sequence import SequenceKind, SequenceSpec
from rpc.errors import invalid_argument
from tandem.v1 import decode_pb2, prefill_pb2
from worker.statuses import engine_errors


@dataclass(frozen=True, slots=True)
class Job:
    """Samples of one prompt to generate: all that were asked for, or, behind a token that has been sent, one of them."""

    request_id: str
    tenant_salt: bytes
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """Tokens already sent, of one sample: computed like the prompt, never sampled again."""
    sampling: SamplingParams
    priority: int
    index: int = 0
    """Which of the RPC's samples the first one is."""

    @classmethod
    def of(cls, request: decode_pb2.DecodeServiceGenerateRequest, model: ModelFacts, limits: EngineLimits) -> Self:
        """Raises StatusError INVALID_ARGUMENT that names the field."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens + (request.sampling_params.max_tokens > 0) > model.max_model_len:  # in front of anything that takes time in proportion to it
            raise invalid_argument("prompt_token_ids", f"{num_tokens} tokens and one more are over max_model_len ({model.max_model_len})")
        with engine_errors():
            sampling = sampling_params_from_proto(request.sampling_params, vocab_size=model.vocab_size, sample_index=request.sample_index)
            prompt = token_ids_from_proto(request.prompt_token_ids, vocab_size=model.vocab_size, field="prompt_token_ids")
            output = token_ids_from_proto(request.output_token_ids, vocab_size=model.vocab_size, field="output_token_ids")
        if not prompt:
            raise invalid_argument("prompt_token_ids", "must not be empty")
        if sampling.n > limits.max_num_seqs:
            raise invalid_argument("sampling_params.n", f"is {sampling.n}, this instance generates at most {limits.max_num_seqs} samples at a time")
        if output and sampling.n > 1:
            raise invalid_argument("output_token_ids", f"are those of one sample, n is {sampling.n}")
        if output and len(output) >= sampling.max_tokens:
            raise invalid_argument("output_token_ids", f"holds {len(output)} tokens, max_tokens is {sampling.max_tokens}")
        job = cls(request.request_id, request.tenant_salt, prompt, output, sampling, request.priority)
        return job.of_sample(0, output) if output else job

    @property
    def indices(self) -> range:
        """Its samples among the RPC's."""
        return range(self.index, self.index + self.sampling.n)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_left(self) -> int:
        """Most tokens still to be generated, by each sample."""
        return self.sampling.max_tokens - len(self.output_token_ids)

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt tokens whose log probability is to be told."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.prompt_token_ids) - 1

    def of_sample(self, index: int, output_token_ids: Iterable[int]) -> Self:
        """The rest of one of its samples once `output_token_ids` are what has gone out of it; the prompt's log probabilities went before them."""
        sampling = replace(self.sampling.of_sample(index - self.index), prompt_logprobs=None)
        return replace(self, index=index, sampling=sampling, output_token_ids=tuple(output_token_ids))

    def spec(self, kind: SequenceKind, max_recompute_tokens: int | None) -> SequenceSpec:
        """What the engine is asked for, under a new sequence id."""
        return SequenceSpec(
            seq_id=f"{self.request_id[:64]}#{secrets.token_hex(8)}",
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            kind=kind,
            output_token_ids=self.output_token_ids,
            tenant_salt=self.tenant_salt,
            priority=self.priority,
            max_recompute_tokens=max_recompute_tokens,
        )

    def start(self) -> prefill_pb2.PrefillStart:
        """What prefill is asked for; the pairing and how it is read are the caller's to add."""
        return prefill_pb2.PrefillStart(
            request_id=self.request_id,
            tenant_salt=self.tenant_salt,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            sampling_params=sampling_params_to_proto(self.sampling),
            sample_index=self.sampling.sample_index,
            priority=self.priority,
        )

    def finish_of_first(self, first: SampledToken, model: ModelFacts) -> Finish | None:
        """Whether its next token is a sample's last one."""
        num_output = len(self.output_token_ids) + 1
        return finish_of(self.sampling, model.eos_token_ids, first.token_id, num_output, self.num_tokens + 1, model.max_model_len)
