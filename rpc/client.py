"""The client-side span of an outgoing RPC and the metadata that carries it.

An explicit context manager around the call and not an interceptor: grpc.aio's client interceptors for streams return before the stream ends, so the
span's end and status would have to be pieced together from callbacks, and a bidirectional call would pass through a proxy object. One form serves all
four kinds of RPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from opentelemetry.trace import SpanKind

from rpc.errors import StatusError
from rpc.methods import is_request, method_name
from telemetry.spans import RPC_METHOD, RPC_RESPONSE_STATUS_CODE, RPC_SYSTEM_NAME
from telemetry.tracing import NO_SPAN, Attributes, SpanHandle, inject, span

Metadata = tuple[tuple[str, str | bytes], ...]


@contextmanager
def outgoing(method: str, *, metadata: Metadata = (), attributes: Attributes | None = None) -> Iterator[tuple[Metadata, SpanHandle]]:
    """Opens the CLIENT span of an RPC; start, read and finish the call inside.

        with outgoing("tandem.v1.DecodeService/Generate") as (metadata, span):
            call = stub.Generate(request, timeout=next_hop_s(remaining), metadata=metadata)
            async for response in call: ...

    `metadata` is yielded with traceparent appended. The span's status is what leaves the block: AioRpcError or StatusError its code, a cancel CANCELLED,
    a clean exit OK; anything but OK is an error of a client span. A block that cancels its call and goes on may set RPC_RESPONSE_STATUS_CODE itself.
    With tracing off, and for RPCs that are no requests (rpc.methods), only the metadata passes through.
    """
    name = method_name(method)
    if not is_request(name):
        yield metadata, NO_SPAN
        return
    with span(name, kind=SpanKind.CLIENT, attributes={RPC_SYSTEM_NAME: "grpc", RPC_METHOD: name, **(attributes or {})}, set_error=False) as handle:
        carried = list(metadata)
        inject(carried)
        handle.set_attribute(RPC_RESPONSE_STATUS_CODE, grpc.StatusCode.OK.name)
        try:
            yield tuple(carried), handle
        except grpc.aio.AioRpcError as error:
            _set_status(handle, error.code())
            raise
        except StatusError as error:
            _set_status(handle, error.code)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            _set_status(handle, grpc.StatusCode.CANCELLED)
            raise


def _set_status(handle: SpanHandle, code: grpc.StatusCode) -> None:
    handle.set_attribute(RPC_RESPONSE_STATUS_CODE, code.name)
    handle.fail(code.name)
