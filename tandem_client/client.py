"""The client for threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tandem_client.chat import ChatMessage
from tandem_client.completion import Completion
from tandem_client.errors import Cancelled
from tandem_client.gateway_status import GatewayStatus, Model
from tandem_client.options import Options
from tandem_client.prompt import chat_request, prompt_request
from tandem_client.session import Session
from tandem_client.stream import Stream


class Client(Session):
    """One per gateway and process: it may be used from many threads at once, and all its calls share one connection to each address. AsyncClient is the same
    for asyncio.

    Every call raises TandemError; a parameter that is unknown or of a wrong type raises TypeError or ValueError before anything is sent.
    """

    _channel: grpc.Channel | None = None
    _gateway: Any = None

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """A completion of a text, or of token ids, whole. It is streamed all the same, since only a stream can be resumed after a cut."""
        return self._whole(self.stream(prompt, **options))

    def chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> Completion:
        """The answer to a conversation, whole."""
        return self._whole(self.stream_chat(messages, **options))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """A completion while it is generated. Nothing is sent before the stream is entered or read."""
        return self._stream(prompt_request(prompt, options), options)

    def stream_chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> Stream:
        """The answer to a conversation while it is generated."""
        return self._stream(chat_request(messages, options), options)

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The served models."""
        response = self._ask(self._stub().ListModels, gateway_pb2.ListModelsRequest(), timeout_s)
        return tuple(Model.of(model) for model in response.models)

    def status(self, *, timeout_s: float | None = None) -> GatewayStatus:
        """What the gateway knows of itself and of both pools."""
        return GatewayStatus.of(self._ask(self._stub().GetStatus, gateway_pb2.GetStatusRequest(), timeout_s))

    def close(self) -> None:
        """Ends whatever runs (Cancelled), and the connection; a call that comes later raises RuntimeError."""
        self._cancel_streams()
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _whole(self, stream: Stream) -> Completion:
        with stream:
            return stream.completion()

    def _stream(self, request: gateway_pb2.GenerateRequest, options: Options) -> Stream:
        return self._watch(Stream(self._generation(request, options), self._open))

    def _open(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        return self._stub().Generate(request, timeout=timeout_s, metadata=self._connection.metadata)

    def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                response = method(request, timeout=attempts.begin(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(error)
                if self._closed.wait(wait_s):
                    raise Cancelled.here() from None
            except ValueError:  # gRPC's word for a channel that another thread has closed since
                if self._closed.is_set():
                    raise Cancelled.here() from None
                raise
            else:
                attempts.ended_well()
                return response

    def _stub(self) -> Any:
        with self._opening:
            self._check_open()
            if self._channel is None:
                target, options, credentials = self._connection.target, self._connection.options, self._credentials
                self._channel = grpc.insecure_channel(target, options) if credentials is None else grpc.secure_channel(target, credentials, options)
                self._gateway = gateway_pb2_grpc.GatewayServiceStub(self._channel)
            return self._gateway
