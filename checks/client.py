"""A client that notes what a check must know: tokens, times, trailers, status."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc

from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2


@dataclass
class Completion:
    """One request as its client saw it. Times are time.monotonic() seconds."""

    request_id: str
    started_s: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)
    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    first_message_ns: int = 0
    """time.time_ns() of the first token, for comparison with spans."""
    started_ns: int = 0
    finish_reason: int = generation_pb2.FINISH_REASON_UNSPECIFIED
    usage: generation_pb2.Usage | None = None
    trailers: dict[str, str] = field(default_factory=dict)
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times_s[0] - self.started_s


async def complete(stub: gateway_pb2_grpc.GatewayServiceStub, request: gateway_pb2.GenerateRequest, *, timeout_s: float) -> Completion:
    """Runs one request to its end, whatever that is; a status is a result here, not an exception."""
    completion = Completion(request.request_id, time.monotonic(), started_ns=time.time_ns())
    call = stub.Generate(request, timeout=timeout_s)
    try:
        async for message in call:
            if message.token_ids and not completion.token_ids:
                completion.first_message_ns = time.time_ns()
            now = time.monotonic()
            completion.token_ids.extend(message.token_ids)
            completion.token_times_s.extend([now] * len(message.token_ids))
            completion.logprobs.extend(message.logprobs)
            completion.text += message.text
            if message.HasField("finish"):
                completion.finish_reason = message.finish.finish_reason
            if message.HasField("usage"):
                completion.usage = message.usage
        completion.code = await call.code()
    except grpc.aio.AioRpcError as error:
        completion.code, completion.details = error.code(), error.details() or ""
    finally:
        call.cancel()
    completion.trailers = {key: str(value) for key, value in (await call.trailing_metadata() or ())}
    return completion
