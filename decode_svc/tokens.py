"""From an engine's events to messages: the part of a Generate RPC that lasts."""

from __future__ import annotations

import time

from opentelemetry.context import Context

from decode_svc.output import Output
from decode_svc.pool import DecodePool
from engine.async_engine import SequenceStream
from engine.events import Event, Failed, Finished, Preempted, Scheduled, Tokens
from engine.sampling_params import Finish, SampledToken
from rpc.failpoints import failpoint
from tandem.v1 import decode_pb2
from telemetry import spans
from telemetry.tracing import SpanEvent, current_context, record_span
from worker.progress import PromptProgress
from worker.statuses import status_of

PATH_NAMES = {
    decode_pb2.PROMPT_PATH_HANDOVER: "handover",
    decode_pb2.PROMPT_PATH_LOCAL: "local",
    decode_pb2.PROMPT_PATH_LOCAL_FALLBACK: "local_fallback",
    decode_pb2.PROMPT_PATH_PREFILL_ONLY: "prefill_only",
}


class DecodeSpan:
    """The span `decode`: from a known first token to the last one. Recorded once, by `end`, below the span `trace`."""

    def __init__(self, trace: Context | None) -> None:
        self.started_ns = time.monotonic_ns()
        self._trace = trace
        self._events: list[SpanEvent] = []

    def first_token(self) -> None:
        """The first token has gone out."""
        self._events.append((spans.FIRST_TOKEN, time.monotonic_ns(), {}))

    def preempted(self, at_ns: int) -> None:
        """The sequence is to be computed again."""
        self._events.append((spans.PREEMPTED, at_ns, {}))

    def end(self, num_tokens: int, error: str | None = None) -> None:
        """The last token has gone out, or there will be none."""
        record_span(
            spans.DECODE, self.started_ns, time.monotonic_ns(), parent=self._trace, attributes={spans.NUM_TOKENS: num_tokens}, events=self._events, error=error
        )


async def send_first(
    pool: DecodePool, output: Output, tokens: list[SampledToken], report: decode_pb2.PromptReport, finish: Finish | None, decode: DecodeSpan
) -> None:
    """Sends the first token; the time to the first token ends here."""
    await failpoint(spans.DECODE)
    await output.send(tokens, prompt=report, finish=finish)
    decode.first_token()
    pool.metrics.prompt_path(PATH_NAMES[report.path]).inc()


async def stream_tokens(pool: DecodePool, output: Output, stream: SequenceStream, decode: DecodeSpan) -> None:
    """Sends what the engine generates behind the first token until the sequence ends; tokens that are there together go in one message."""
    num_before = len(output.token_ids)
    error: str | None = "cancelled"
    try:
        while True:
            tokens, finish = _collect(await stream.get(), decode)
            if tokens or finish:
                await output.send(tokens, finish=finish)
            if finish:
                error = None
                return
    finally:
        decode.end(1 + len(output.token_ids) - num_before, error)
        pool.metrics.request_decode_time_seconds.observe((time.monotonic_ns() - decode.started_ns) / 1e9)


def _collect(events: list[Event], decode: DecodeSpan | None) -> tuple[list[SampledToken], Finish | None]:
    tokens: list[SampledToken] = []
    finish: Finish | None = None
    for event in events:
        match event:
            case Tokens():
                tokens.extend(event.tokens)
            case Finished():
                finish = event.finish
            case Failed():
                raise status_of(event.error)
            case Preempted() if decode is not None:
                decode.preempted(event.at_ns)
            case _:
                pass
    return tokens, finish


async def stream_local(pool: DecodePool, output: Output, stream: SequenceStream, report: decode_pb2.PromptReport, progress: PromptProgress) -> None:
    """The same for a prompt that this engine computes itself."""
    while True:
        events = await stream.get()
        for event in events:
            progress.take(event)
            if isinstance(event, Scheduled):
                await output.reservation(num_charged_blocks=event.num_charged_blocks, num_blocks=len(event.block_ids), cached_tokens=event.cached_tokens)
        tokens, finish = _collect(events, None)
        if not tokens and not finish:
            continue
        await failpoint(spans.PREFILL)
        progress.end()
        pool.metrics.request_prefill_time_seconds.observe(progress.prefill_s)
        report.cached_tokens = progress.cached_tokens
        decode = DecodeSpan(current_context())
        await send_first(pool, output, tokens, report, finish, decode)
        if finish:
            decode.end(len(tokens))
            return
        await stream_tokens(pool, output, stream, decode)
        return
