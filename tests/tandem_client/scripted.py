"""A gateway that follows a script, one act for each attempt, as a real gRPC server; and one that passes a real gateway's stream on and cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2

Context = grpc.aio.ServicerContext[Any, Any]
Act = Callable[[gateway_pb2.GenerateRequest, Context], Awaitable[None]]
Response = gateway_pb2.GenerateResponse


class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """The last act plays for all later attempts too."""

    def __init__(self, *acts: Act) -> None:
        self.acts = acts
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.times_left: list[float] = []
        self.running = 0
        self.num_cancelled = 0
        self.idle = asyncio.Event()

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> None:
        self.requests.append(request)
        self._note(context)
        self.running += 1
        self.idle.clear()
        try:
            await self.acts[min(len(self.requests), len(self.acts)) - 1](request, context)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Context) -> gateway_pb2.ListModelsResponse:
        self._note(context)
        num_asked = len(self.metadata)
        if num_asked <= len(self.acts) - 1:
            await self.acts[num_asked - 1](gateway_pb2.GenerateRequest(), context)
        return gateway_pb2.ListModelsResponse(models=[gateway_pb2.Model(id="m", max_model_len=10, vocab_size=5, eos_token_ids=[2])])

    def _note(self, context: Context) -> None:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.times_left.append(context.time_remaining())


@asynccontextmanager
async def serving(servicer: Any, *, credentials: grpc.ServerCredentials | None = None, port: int = 0) -> AsyncIterator[str]:
    """The address of a server on 127.0.0.1."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)


def says(*messages: Response, trailers: Sequence[tuple[str, str]] = ()) -> Act:
    """Sends these and ends well."""

    async def act(_: gateway_pb2.GenerateRequest, context: Context) -> None:
        for message in messages:
            await context.write(message)
        context.set_trailing_metadata(tuple(trailers))

    return act


def then(act: Act, end: Act) -> Act:
    """One behind the other."""

    async def both(request: gateway_pb2.GenerateRequest, context: Context) -> None:
        await act(request, context)
        await end(request, context)

    return both


def refuses(error: StatusError) -> Act:
    """Ends with a status that has details."""

    async def act(_: gateway_pb2.GenerateRequest, context: Context) -> None:
        await context.abort_with_status(error.to_status())

    return act


def cuts(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Act:
    """Ends as a broken connection does: a status without a word of the gateway's."""

    async def act(_: gateway_pb2.GenerateRequest, context: Context) -> None:
        await context.abort(code, "Socket closed")

    return act


async def hangs(_: gateway_pb2.GenerateRequest, __: Context) -> None:
    """Never ends."""
    await asyncio.Event().wait()


def message(position: int, *token_ids: int, text: str = "", finish: bool = False, index: int = 0, seed: int | None = None) -> Response:
    """A message of the stream; `finish`: the last one."""
    response = Response(position=position, token_ids=token_ids, text=text, index=index)
    if seed is not None:
        response.seed, response.model = seed, "m"
    if finish:
        response.finish.finish_reason = generation_pb2.FINISH_REASON_LENGTH
        num_tokens = position + len(token_ids)
        response.usage.CopyFrom(generation_pb2.Usage(prompt_tokens=3, completion_tokens=num_tokens, total_tokens=3 + num_tokens))
    return response


class CuttingGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Passes on what a real gateway says, and cuts each attempt behind so many of its tokens; the attempts behind these are left whole."""

    def __init__(self, target: str, cuts_after: Sequence[int], code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self._target = target
        self._cuts_after = list(cuts_after)
        self._code = code

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> None:
        self.requests.append(request)
        cut_after = self._cuts_after.pop(0) if self._cuts_after else None
        num_tokens = 0
        async with grpc.aio.insecure_channel(self._target) as channel:
            stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
            call = stub.Generate(request, timeout=context.time_remaining())
            try:
                async for response in call:
                    if cut_after is not None and num_tokens + len(response.token_ids) >= cut_after and not response.HasField("finish"):
                        await context.write(response)
                        await context.abort(self._code, "Socket closed")
                    num_tokens += len(response.token_ids)
                    await context.write(response)
            finally:
                call.cancel()
            context.set_trailing_metadata(tuple((key, value) for key, value in await call.trailing_metadata() if key.startswith("tandem-")))
