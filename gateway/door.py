"""The gRPC registration of GatewayService, with requests that are looked over before they are parsed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from gateway.wire import CutShortError, WireLimits, check_wire
from tandem.v1 import gateway_pb2, gateway_pb2_grpc

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
_MAX_UTF8_BYTES = 4
_MAX_ID_BYTES = 5
"""A tag stands in front of ids that are not packed; more than four of their own are refused wherever they are."""
_MAX_HEADER_BYTES = 6
"""Tag and length of a packed list."""
_OTHER_BYTES = 1 << 20
"""For what is short in a request's parameters, by far."""
_RECORDS_PER_MESSAGE = 3
M = TypeVar("M", bound=Message)


def wire_limits(model: ServedModel, limits: RequestLimits) -> WireLimits:
    """Far above what `check_request` lets through, so that it is the one that says what the limit is in all but monstrous cases."""
    text = _MAX_UTF8_BYTES * model.max_model_len * model.longest_token_chars
    ids = _MAX_ID_BYTES * model.max_model_len
    lists = 2 * limits.max_logit_biases + limits.max_stop_strings + limits.max_bad_words + 2 * limits.max_bad_words_ids
    return WireLimits(
        max_records=_RECORDS_PER_MESSAGE * limits.max_messages + 2 * lists,
        max_bytes={
            "text": text,
            "token_ids": ids + _MAX_HEADER_BYTES,
            "output_token_ids": ids,
            "chat.messages.content": text,
            "sampling_params": _MAX_ID_BYTES * model.vocab_size + _OTHER_BYTES,
        },
    )


def strictly(message: type[M], limits: WireLimits) -> Callable[[bytes], M]:
    """A deserializer that refuses what is no field, and names it. Raises StatusError, DecodeError for bytes that are no message."""

    def parse(raw: bytes) -> M:
        try:
            check_wire(raw, message, limits)
            return message.FromString(raw)
        except CutShortError as error:
            raise DecodeError("it is cut short") from error
        except DecodeError:
            check_wire(raw, message, limits, look_at_text=True)
            raise

    return parse


def add_gateway_service(servicer: gateway_pb2_grpc.GatewayServiceServicer, server: grpc.aio.Server, limits: WireLimits) -> None:
    """As the generated add_GatewayServiceServicer_to_server, but for the deserializers."""
    makers: dict[bool, Any] = {False: grpc.unary_unary_rpc_method_handler, True: grpc.unary_stream_rpc_method_handler}
    handlers = {
        method.name: makers[method.server_streaming](
            getattr(servicer, method.name),
            request_deserializer=strictly(_class_of(method.input_type.name), limits),
            response_serializer=_class_of(method.output_type.name).SerializeToString,
        )
        for method in SERVICE.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _class_of(name: str) -> type[Message]:
    found: type[Message] = getattr(gateway_pb2, name)
    return found
