"""What is known of one request while it runs: for its trailers, its span and the metrics, counted once on every way out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc
from opentelemetry import trace

from gateway.answer import Answer
from gateway.resolved_request import ResolvedRequest
from gateway.router import Route
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2
from telemetry import spans
from telemetry.metrics import GatewayMetrics

_PATHS = {
    decode_pb2.PROMPT_PATH_HANDOVER: "handover",
    decode_pb2.PROMPT_PATH_LOCAL: "local",
    decode_pb2.PROMPT_PATH_LOCAL_FALLBACK: "local_fallback",
    decode_pb2.PROMPT_PATH_PREFILL_ONLY: "prefill_only",
}
FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(slots=True)
class _Pace:
    first: float
    last: float
    """When its last tokens were sent."""
    num_tokens: int = 0


@dataclass(slots=True)
class Progress:
    """One request's course. Times are `time.monotonic()`."""

    metrics: GatewayMetrics
    trailers: dict[str, str]
    request_id: str = ""
    phase: str = "validate"
    """Where it is: validate, tokenize, queue, route, prefill, decode."""
    num_sent: int = 0
    """Tokens handed to the client in this stream."""
    num_messages: int = 0
    """Messages received from decode."""
    queued_s: float | None = None
    """Seconds in the queue, all times that it was there; None until it was admitted."""
    _started: float = field(default_factory=time.monotonic)
    _paces: dict[int, _Pace] = field(default_factory=dict)
    """By sample."""
    _span: trace.Span = field(default_factory=trace.get_current_span)

    def began(self, request_id: str) -> None:
        """The request has its id."""
        self.request_id = request_id
        self.trailers["tandem-request-id"] = request_id
        self._span.set_attribute(spans.REQUEST_ID, request_id)

    def resolved(self, request: ResolvedRequest, model: str, *, chat: bool) -> None:
        """Parameters are known."""
        if not self._span.is_recording():
            return
        given = request.sampling_params
        attributes: dict[str, str | int | float] = {
            spans.GEN_AI_OPERATION_NAME: "chat" if chat else "text_completion",
            spans.GEN_AI_PROVIDER_NAME: "tandem",
            spans.GEN_AI_REQUEST_MODEL: model,
            spans.GEN_AI_RESPONSE_MODEL: model,
            spans.GEN_AI_RESPONSE_ID: request.request_id,
            spans.GEN_AI_REQUEST_MAX_TOKENS: request.max_tokens,
            spans.GEN_AI_USAGE_INPUT_TOKENS: len(request.prompt_token_ids),
        }
        optional = {"temperature": spans.GEN_AI_REQUEST_TEMPERATURE, "top_p": spans.GEN_AI_REQUEST_TOP_P, "top_k": spans.GEN_AI_REQUEST_TOP_K}
        attributes |= {attribute: getattr(given, name) for name, attribute in optional.items() if given.HasField(name)}
        if request.n > 1:
            attributes[spans.GEN_AI_REQUEST_CHOICE_COUNT] = request.n
        # An OpenTelemetry integer has 63 bits; a seed has 64.
        self._span.set_attributes({**attributes, spans.GEN_AI_REQUEST_SEED: str(request.seed)})

    def routed(self, route: Route) -> None:
        """Instances are chosen."""
        self.phase = "prefill"
        self.trailers["tandem-decode-instance"] = route.decode.name
        self._span.set_attribute(spans.DECODE_INSTANCE, route.decode.name)

    def received(self, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
        """Decode said something."""
        self.num_messages += 1
        if message.HasField("prompt"):
            path = _PATHS.get(message.prompt.path, "unknown")
            self.trailers["tandem-path"] = path
            self._span.set_attribute(spans.PROMPT_PATH, path)
            self.trailers.pop("tandem-prefill-instance", None)  # an earlier report's, whose hand-over failed
            if message.prompt.prefill_instance:
                self.trailers["tandem-prefill-instance"] = message.prompt.prefill_instance
                self._span.set_attribute(spans.PREFILL_INSTANCE, message.prompt.prefill_instance)
        if message.HasField("handover"):
            if message.handover.transport:
                self.trailers["tandem-kv-transport"] = message.handover.transport
            self.trailers["tandem-kv-bytes"] = str(message.handover.kv_bytes)

    def sending(self, response: gateway_pb2.GenerateResponse, answer: Answer) -> None:
        """A message goes to the client now."""
        if self.phase == "prefill" and (response.token_ids or response.HasField("finish")):
            self._prompt_computed(answer.usage())
        if not response.token_ids:
            return
        now, num_tokens = time.monotonic(), len(response.token_ids)
        if not self.num_sent:
            self.metrics.time_to_first_token_seconds.observe(now - self._started)
            self._span.add_event(spans.FIRST_TOKEN)
        pace = self._paces.setdefault(response.index, _Pace(now, now))
        num_gaps = num_tokens if pace.num_tokens else num_tokens - 1
        for _ in range(num_gaps):
            self.metrics.inter_token_latency_seconds.observe((now - pace.last) / num_gaps)
        pace.last = now
        pace.num_tokens += num_tokens
        self.num_sent += num_tokens
        self.trailers["tandem-tokens-sent"] = str(self.num_sent)
        self.metrics.generation_tokens.inc(num_tokens)

    def _prompt_computed(self, usage: generation_pb2.Usage) -> None:
        self.phase = "decode"
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.prompt_tokens_cached.inc(usage.cached_tokens)

    def ended(self, code: grpc.StatusCode, answer: Answer | None) -> None:
        """The request is over: counts it, once, under its first sample's finish."""
        reasons = [FINISH_REASONS[reason] for reason in answer.finish_reasons] if answer is not None else []
        if code is not grpc.StatusCode.OK or not reasons:
            reasons = ["abort" if code is grpc.StatusCode.CANCELLED else "error"]
        self.metrics.requests(reasons[0], code.name).inc()
        if self.queued_s is not None:
            self.metrics.request_queue_time_seconds.observe(self.queued_s)
        if answer is not None:
            usage = answer.usage()
            output = {spans.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens, spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: usage.cached_tokens}
            self._span.set_attributes({**output, spans.GEN_AI_RESPONSE_FINISH_REASONS: reasons})
        if code is grpc.StatusCode.OK:
            self.metrics.e2e_request_latency_seconds.observe(time.monotonic() - self._started)
            for pace in self._paces.values():
                if pace.num_tokens > 1:
                    self.metrics.request_time_per_output_token_seconds.observe((pace.last - pace.first) / (pace.num_tokens - 1))
