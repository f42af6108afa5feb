"""A generic gRPC client: it has none of Tandem's code, and learns the contract from the server by reflection.

    python clients_reflection.py HOST:PORT

Runs where only grpcio, grpcio-reflection and protobuf are. Prints the name of each use as it passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

_SERVICE = "tandem.v1.GatewayService"
_TIMEOUT_S = 30.0
_SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def passed(name: str) -> None:
    print(f"passed: {name}", flush=True)


class Caller:
    """Calls methods by name, with dicts for messages."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> list[str]:
        return sorted(self._database.get_services())

    def unary(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        found, encode, decode = self._codec(method)
        assert not found.server_streaming
        call = self._channel.unary_unary(f"/{_SERVICE}/{method}", request_serializer=encode, response_deserializer=decode)
        return _as_dict(call(request, timeout=_TIMEOUT_S))

    def stream(self, method: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Closing it cancels the call."""
        found, encode, decode = self._codec(method)
        assert found.server_streaming
        call = self._channel.unary_stream(f"/{_SERVICE}/{method}", request_serializer=encode, response_deserializer=decode)(request, timeout=_TIMEOUT_S)
        try:
            yield from map(_as_dict, call)
        finally:
            call.cancel()

    def _codec(self, method: str) -> tuple[MethodDescriptor, Callable[[Any], bytes], Callable[[bytes], Any]]:
        found = self._pool.FindServiceByName(_SERVICE).FindMethodByName(method)
        request_class, response_class = GetMessageClass(found.input_type), GetMessageClass(found.output_type)
        return found, lambda fields: json_format.ParseDict(fields, request_class()).SerializeToString(), response_class.FromString


def _as_dict(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


def reflection(caller: Caller) -> None:
    found = caller.services()
    assert {_SERVICE, "grpc.health.v1.Health"} <= set(found), found
    passed("reflection lists the services")


def models(caller: Caller) -> None:
    [model] = caller.unary("ListModels", {})["models"]
    assert model["id"] and model["max_model_len"] > 0, model
    assert caller.unary("GetStatus", {})["instances"], "no instances"
    passed("ListModels, GetStatus")


def generate(caller: Caller) -> None:
    messages = list(caller.stream("Generate", {"text": "Once upon a time", "sampling_params": _SAMPLING}))
    tokens = [token for message in messages for token in message.get("token_ids", ())]
    assert len(tokens) == 12, messages
    assert messages[-1]["finish"]["finish_reason"] == "FINISH_REASON_LENGTH", messages[-1]
    assert messages[-1]["usage"]["completion_tokens"] == 12, messages[-1]
    passed("Generate streams dynamic messages")
    whole = caller.unary("GenerateUnary", {"request": {"text": "Once upon a time", "sampling_params": _SAMPLING}})
    assert whole["choices"][0]["token_ids"] == tokens, (whole, tokens)
    assert whole["choices"][0]["text"] == _text(messages), (whole, messages)
    passed("GenerateUnary gives the same tokens")
    chat = {"messages": [{"role": "user", "content": "Name three colours."}]}
    assert _text(caller.stream("Generate", {"chat": chat, "sampling_params": _SAMPLING}))
    passed("Generate with a conversation")


def _text(messages: Iterable[dict[str, Any]]) -> str:
    return "".join(message.get("text", "") for message in messages)


def refusal(caller: Caller) -> None:
    refused: Any = None
    try:
        list(caller.stream("Generate", {"text": "x", "sampling_params": {"temperature": -1.0}}))
    except grpc.RpcError as error:
        refused = error
    assert refused is not None, "a temperature of -1 was taken"
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT, refused
    assert "temperature" in refused.details(), refused
    passed("INVALID_ARGUMENT names the field")


def cancel(caller: Caller) -> None:
    [model] = caller.unary("ListModels", {})["models"]
    stream = caller.stream("Generate", {"text": "Once upon a time", "sampling_params": {"max_tokens": model["max_model_len"] // 2, "ignore_eos": True}})
    assert isinstance(stream, Iterator)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    passed("cancel")


def main() -> None:
    with grpc.insecure_channel(sys.argv[1]) as channel:
        caller = Caller(channel)
        for use in (reflection, models, generate, refusal, cancel):
            use(caller)
    print(f"version: {metadata.version('grpcio-reflection')}")


if __name__ == "__main__":
    main()
