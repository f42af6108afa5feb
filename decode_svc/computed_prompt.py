"""A prompt that a prefill instance has computed, and the first tokens that it sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from decode_svc.decode_span import DecodeSpan
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from decode_svc.paired import Paired
from decode_svc.pool import DecodePool
from decode_svc.prefill_call import PrefillCall
from decode_svc.prompt_logprobs import PromptLogprobs
from engine.proto import first_token_from_proto
from engine.sampling_params import Finish, FinishReason, SampledToken
from kvtransfer.errors import HandoverProtocolError
from kvtransfer.handover import Handover
from rpc.failpoints import failpoint
from tandem.v1 import decode_pb2, generation_pb2, prefill_pb2
from telemetry import spans

_PATH_NAMES = {
    decode_pb2.PROMPT_PATH_HANDOVER: "handover",
    decode_pb2.PROMPT_PATH_LOCAL: "local",
    decode_pb2.PROMPT_PATH_LOCAL_FALLBACK: "local_fallback",
    decode_pb2.PROMPT_PATH_PREFILL_ONLY: "prefill_only",
}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A sample's next token, none when none is wanted, and its finish when nothing follows."""

    index: int
    tokens: tuple[SampledToken, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """What prefill has told, with the number of tokens and log probabilities that were asked for."""

    done: prefill_pb2.PrefillDone
    first: tuple[FirstToken, ...]
    """Of each of the job's samples."""
    logprobs: Sequence[generation_pb2.TokenLogprob]
    at_ns: int

    @property
    def ends(self) -> bool:
        """Nothing follows in any sample."""
        return all(first.finish is not None for first in self.first)

    async def send(self, rpc: GenerateRpc, report: decode_pb2.PromptReport, decode: DecodeSpan) -> None:
        """Sends the first tokens; the time to the first token ends here."""
        await failpoint(spans.DECODE)
        report.cached_tokens = self.done.cached_tokens
        await rpc.output.prompt_logprobs(self.logprobs)
        for first in self.first:
            await rpc.output.send(first.index, first.tokens, prompt=report if first is self.first[0] else None, finish=first.finish)
            decode.sent(len(first.tokens))
        count_path(rpc.pool, report)


def count_path(pool: DecodePool, report: decode_pb2.PromptReport) -> None:
    """A prompt has been computed in this way."""
    pool.metrics.prompt_path(_PATH_NAMES[report.path]).inc()


async def ask(call: PrefillCall, job: Job, paired: Paired, *, hold: bool = False, num_cached_tokens: int = 0) -> int:
    """Asks prefill for a job's prompt, and to `hold` its blocks; returns when that was, as of `time.monotonic_ns()`. Raises AioRpcError, HandoverError."""
    start = job.start()
    start.pairing_id = paired.pairing_id
    if hold:
        start.transport = paired.path.transport
        start.num_cached_tokens = num_cached_tokens
        start.checksum = paired.path.checksum
    asked_ns = time.monotonic_ns()
    await call.start(start)
    return asked_ns


async def take(call: PrefillCall, pool: DecodePool, job: Job, asked_ns: int, handover: Handover | None = None) -> ComputedPrompt:
    """Waits for what was asked for. Raises AioRpcError, HandoverError, FieldError."""
    logprobs = PromptLogprobs(job, pool.engine.model.vocab_size)
    done = await call.done(handover, logprobs)
    if handover is not None:
        handover.computed()
    at_ns = time.monotonic_ns()
    logprobs.check_complete()
    first = _first_tokens(pool, job, done)
    _check_numbers(job, done)
    # What one instance says here decides about attempts at all others: it cannot have taken longer than the call did.
    elapsed_s = (at_ns - asked_ns) / 1e9
    pool.pace.saw(queue_s=min(done.queue_s, elapsed_s), prefill_s=min(done.prefill_s, elapsed_s), num_tokens=done.computed_tokens)
    return ComputedPrompt(done, first, logprobs.entries, at_ns)


def _check_numbers(job: Job, done: prefill_pb2.PrefillDone) -> None:
    if not (done.queue_s >= 0.0 and done.prefill_s >= 0.0):  # NaN is neither
        raise HandoverProtocolError(f"prefill says that {done.queue_s} s of queue and {done.prefill_s} s of work have passed")
    if done.cached_tokens > job.num_tokens:
        raise HandoverProtocolError(f"prefill says that {done.cached_tokens} of {job.num_tokens} tokens were cached")


def _first_tokens(pool: DecodePool, job: Job, done: prefill_pb2.PrefillDone) -> tuple[FirstToken, ...]:
    model, num_wanted = pool.engine.model, job.sampling.n if job.num_left else 0
    if len(done.first_tokens) != num_wanted:
        raise HandoverProtocolError(f"prefill sent {len(done.first_tokens)} first tokens of {num_wanted}")
    if not num_wanted:
        return tuple(FirstToken(index, (), Finish(FinishReason.LENGTH)) for index in job.indices)
    tokens = [first_token_from_proto(message, vocab_size=model.vocab_size) for message in done.first_tokens]
    return tuple(FirstToken(index, (token,), job.finish_of_first(token, model)) for index, token in zip(job.indices, tokens, strict=True))
