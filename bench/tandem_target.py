"""A Tandem gateway over gRPC, in tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import grpc

from bench.plan import PlannedRequest
from bench.record import Outcome
from bench.run import Sample
from bench.target import Clock, Exchange, TargetError
from rpc.channels import CONTROL_OPTIONS, control_channel
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2

_GENERATE: Final = "/tandem.v1.GatewayService/Generate"
_ASK_TIMEOUT_S: Final = 5.0
_OPEN_TIMEOUT_S: Final = 10.0
_STREAMS_PER_CONNECTION: Final = 1024
"""Well below what the gateway takes on one; more would wait unseen in this process."""
_REFUSED: Final = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_NOBODY_THERE: Final = ("failed to connect", "Socket closed")
"""gRPC's own words of an UNAVAILABLE that no server has said: a failure, as it is over HTTP."""
_FINISH_REASONS: Final = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A request until gRPC takes its bytes."""

    body: bytes
    clock: Clock
    exchange: Exchange


def _handed_over(outgoing: _Outgoing) -> bytes:
    # gRPC calls its serializer on the event loop right in front of handing the bytes to its transport: the truest time of sending there is.
    outgoing.exchange.sent_s = outgoing.clock()
    return outgoing.body


class TandemTarget:
    """GatewayService.Generate. `target` is host:port; `model` is needed only where several are served."""

    def __init__(self, target: str, *, model: str = "", temperature: float = 0.0, seed: int = 0) -> None:
        self.name = f"tandem {target}"
        self._target = target
        self._model = model
        self._temperature = temperature
        self._seed = seed
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._connections: list[tuple[grpc.aio.Channel, Any]] = []
        """For requests: apart from the one that samples go over."""
        self._num_out = 0
        self._served = gateway_pb2.Model()

    async def open(self) -> None:
        """Raises TargetError when the gateway cannot be reached or does not serve the model."""
        self._channel = control_channel(self._target)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        try:
            listed = await self._stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=_OPEN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"{self.name} cannot be loaded: {error.code().name}: {error.details()}") from None
        served = [model.id for model in listed.models]
        if self._model and self._model not in served:
            raise TargetError(f"{self.name} does not serve model {self._model!r}, but {', '.join(served) or 'none'}")
        if not self._model and len(served) > 1:
            raise TargetError(f"{self.name} serves several models, name one with --model: {', '.join(served)}")
        self._model = self._model or next(iter(served), "")
        self._served = next((model for model in listed.models if model.id == self._model), gateway_pb2.Model())
        await self._connect()

    async def _connect(self) -> Any:
        channel = grpc.aio.insecure_channel(self._target, options=(*CONTROL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
        generate = channel.unary_stream(_GENERATE, request_serializer=_handed_over, response_deserializer=gateway_pb2.GenerateResponse.FromString)
        self._connections.append((channel, generate))
        if len(self._connections) == 1:
            try:
                await asyncio.wait_for(channel.channel_ready(), _OPEN_TIMEOUT_S)
            except TimeoutError:
                raise TargetError(f"{self.name} cannot be reached") from None
        return generate

    def encode(self, request: PlannedRequest) -> bytes:
        """A GenerateRequest that ends by its number of tokens alone. Special tokens stay in the text, so that no token is without one."""
        sampling = generation_pb2.SamplingParams(
            max_tokens=request.max_tokens,
            min_tokens=request.max_tokens,
            ignore_eos=True,
            temperature=self._temperature,
            seed=(self._seed + max(request.index, 0)) & 0xFFFF_FFFF_FFFF_FFFF,
            skip_special_tokens=False,
        )
        token_ids = generation_pb2.TokenIds(ids=request.prompt_token_ids)
        return gateway_pb2.GenerateRequest(model=self._model, token_ids=token_ids, sampling_params=sampling).SerializeToString()

    async def send(self, request: PlannedRequest, body: bytes, clock: Clock, exchange: Exchange) -> None:
        """No deadline travels: the runner's limit is the same for every kind of server, and leaving the call is how it ends here."""
        needed = self._num_out // _STREAMS_PER_CONNECTION
        generate = self._connections[needed][1] if needed < len(self._connections) else await self._connect()
        self._num_out += 1
        call = generate(_Outgoing(body, clock, exchange))
        try:
            async for response in call:
                if response.token_ids:
                    exchange.take(clock(), len(response.token_ids))
                _note(response, exchange)
            exchange.ended_s = clock()
            exchange.outcome = Outcome.OK
            exchange.path = _path(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            exchange.ended_s = clock()
            _note_error(error, exchange)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            exchange.ended_s = clock()  # the peer ended the call with CANCELLED: grpc.aio raises the same for it
            exchange.outcome, exchange.error = Outcome.FAILED, "CANCELLED by the server"
        finally:
            self._num_out -= 1
            call.cancel()

    async def sample(self, clock: Clock) -> Sample | None:
        """By GetStatus; KV usage is what no allocation could take."""
        try:
            status = await self._status()
        except grpc.aio.AioRpcError:
            return None
        pools = [each.load for each in status.instances if each.role == gateway_pb2.INSTANCE_ROLE_DECODE and each.load.num_blocks]
        kv_usage = max((1 - load.num_free_blocks / load.num_blocks for load in pools), default=None)
        return Sample(clock(), status.num_requests_running, status.num_requests_waiting, kv_usage)

    async def describe(self) -> dict[str, str]:
        """Version and model, and the instances of both pools."""
        found = {"server": "tandem", "model": self._model}
        found |= {"max_model_len": str(self._served.max_model_len), "vocab_size": str(self._served.vocab_size)}
        try:
            status = await self._status()
        except grpc.aio.AioRpcError as error:
            return found | {"version": f"unknown: {error.code().name}"}
        return found | {"version": status.version, "instances": ", ".join(sorted(each.name for each in status.instances))}

    async def _status(self) -> gateway_pb2.GetStatusResponse:
        status: gateway_pb2.GetStatusResponse = await self._stub.GetStatus(gateway_pb2.GetStatusRequest(), timeout=_ASK_TIMEOUT_S)
        return status

    async def close(self) -> None:
        for channel in (self._channel, *(channel for channel, _ in self._connections)):
            if channel is not None:
                await channel.close()
        self._connections.clear()


def _note(response: gateway_pb2.GenerateResponse, exchange: Exchange) -> None:
    if response.text:
        exchange.has_text = True
    if response.HasField("usage"):
        exchange.num_output_tokens = response.usage.completion_tokens
        exchange.num_cached_tokens = response.usage.cached_tokens
    if response.HasField("finish"):
        exchange.finish_reason = _FINISH_REASONS.get(response.finish.finish_reason, "unknown")


def _note_error(error: grpc.aio.AioRpcError, exchange: Exchange) -> None:
    status = StatusError.of(error)
    refused = status.code in _REFUSED and not exchange.arrived and not status.message.startswith(_NOBODY_THERE)
    exchange.outcome = Outcome.REFUSED if refused else Outcome.FAILED
    reason = f" {status.reason}" if status.reason and status.reason != status.code.name else ""
    exchange.error = " ".join(f"{status.code.name}{reason}: {status.message}".split())
    exchange.path = status.trailers.get("tandem-path", "")


def _path(metadata: Any) -> str:
    return next((value for key, value in metadata or () if key == "tandem-path" and isinstance(value, str)), "")
