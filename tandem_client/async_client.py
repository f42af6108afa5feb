"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tandem_client.async_stream import AsyncStream, is_set_within
from tandem_client.chat import ChatMessage
from tandem_client.completion import Completion
from tandem_client.errors import Cancelled
from tandem_client.gateway_status import GatewayStatus, Model
from tandem_client.options import Options
from tandem_client.prompt import chat_request, prompt_request
from tandem_client.session import Session


class AsyncClient(Session):
    """One per gateway and event loop: it belongs to the loop of its first call, and all its calls share one connection to each address. Client is the same
    for threads.

    Every call raises TandemError; a parameter that is unknown or of a wrong type raises TypeError or ValueError before anything is sent.
    """

    _channel: grpc.aio.Channel | None = None
    _gateway: Any = None
    _loop: asyncio.AbstractEventLoop | None = None
    _closing: asyncio.Event | None = None
    """For whoever waits on the loop; from the first call on."""

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """A completion of a text, or of token ids, whole. It is streamed all the same, since only a stream can be resumed after a cut."""
        return await self._whole(self.stream(prompt, **options))

    async def chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> Completion:
        """The answer to a conversation, whole."""
        return await self._whole(self.stream_chat(messages, **options))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncStream:
        """A completion while it is generated. Nothing is sent before the stream is entered or read."""
        return self._stream(prompt_request(prompt, options), options)

    def stream_chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> AsyncStream:
        """The answer to a conversation while it is generated."""
        return self._stream(chat_request(messages, options), options)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The served models."""
        response = await self._ask(self._stub().ListModels, gateway_pb2.ListModelsRequest(), timeout_s)
        return tuple(Model.of(model) for model in response.models)

    async def status(self, *, timeout_s: float | None = None) -> GatewayStatus:
        """What the gateway knows of itself and of both pools."""
        return GatewayStatus.of(await self._ask(self._stub().GetStatus, gateway_pb2.GetStatusRequest(), timeout_s))

    async def close(self) -> None:
        """Ends whatever runs (Cancelled), and the connection; a call that comes later raises RuntimeError."""
        self._cancel_streams()
        if self._closing is not None:
            self._closing.set()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self.close()

    async def _whole(self, stream: AsyncStream) -> Completion:
        async with stream:
            return await stream.completion()

    def _stream(self, request: gateway_pb2.GenerateRequest, options: Options) -> AsyncStream:
        return self._watch(AsyncStream(self._generation(request, options), self._open))

    def _open(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        return self._stub().Generate(request, timeout=timeout_s, metadata=self._connection.metadata)

    async def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        closing = self._closing
        assert closing is not None, "the method is one of the stub's"
        while True:
            try:
                response = await method(request, timeout=attempts.begin(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                if await is_set_within(closing, attempts.wait_after(error)):
                    raise Cancelled.here() from None
            except (asyncio.CancelledError, grpc.aio.UsageError):  # also what grpc.aio says to the calls of a channel that is closed
                task = asyncio.current_task()
                if not self._closed.is_set() or (task is not None and task.cancelling()):
                    raise
                raise Cancelled.here() from None
            else:
                attempts.ended_well()
                return response

    def _stub(self) -> Any:
        self._check_open()
        if self._channel is None:
            target, options, credentials = self._connection.target, self._connection.options, self._credentials
            self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
            self._channel = grpc.aio.insecure_channel(target, options) if credentials is None else grpc.aio.secure_channel(target, credentials, options)
            self._gateway = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        elif self._loop is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncClient belongs to the event loop of its first call; make one for each loop")
        return self._gateway
