"""PrefillService."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from kvtransfer.errors import HandoverProtocolError, HoldUnknownError, NoTransportError, SourceGoneError, StalledError, TransferError
from prefill_svc.conversation import Conversation
from prefill_svc.pool import PrefillPool
from prefill_svc.prompt import check_prompt
from rpc.deadline import at_most
from rpc.errors import StatusError, aborted, failed_precondition, invalid_argument
from rpc.server import RpcServer
from tandem.v1 import prefill_pb2, prefill_pb2_grpc
from worker.active import ActiveRequests
from worker.load import LoadWatch, memory_report
from worker.statuses import engine_errors

SERVICE = "tandem.v1.PrefillService"
STOPPED = "tandem-stopped"
"""Key of WriteKv's trailing metadata that says that nothing writes to the slot any more."""
AnyContext = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves one pool. Every Prefill RPC is the hold on its blocks."""

    def __init__(self, pool: PrefillPool, load: LoadWatch, *, max_active_requests: int = 1024, max_request_time_s: float = 600.0) -> None:
        self._pool = pool
        self._load = load
        self._active = ActiveRequests(max_active_requests)
        self._max_request_time_s = max_request_time_s

    async def Pair(self, request_iterator: object, context: AnyContext) -> None:
        """See prefill.proto."""
        await self._pool.pairings.serve(context)

    async def Prefill(self, request_iterator: object, context: AnyContext) -> None:
        """See prefill.proto."""
        with self._active.one():
            async with at_most(self._max_request_time_s, "prefill"):
                request = await _first_message(context)
                if request is grpc.aio.EOF or request.WhichOneof("step") != "start":
                    raise invalid_argument("step", "the first message must be start")
                pairing = self._pool.pairings.find(request.start.pairing_id)
                with pairing.working():
                    await Conversation(self._pool, check_prompt(request.start, self._pool, pairing), context).run()

    async def ReadKv(self, request: prefill_pb2.ReadKvRequest, context: AnyContext) -> None:
        """See prefill.proto. Its responses are messages already made: bytes."""
        # On their own: a first message that is cut off when the hold closes would leave gRPC unable to send the status, and decode waiting for it.
        await context.send_initial_metadata(())
        pairing = self._pool.pairings.find(request.pairing_id)
        inline = self._pool.sources.inline
        if inline is None or inline.name not in pairing.offered:
            raise _not_offered(inline.name if inline else "inline")
        with pairing.working(), _transfer_errors():
            await inline.send(request, context.write)

    async def WriteKv(self, request: prefill_pb2.WriteKvRequest, context: AnyContext) -> prefill_pb2.WriteKvResponse:
        """See prefill.proto."""
        try:
            pairing = self._pool.pairings.find(request.pairing_id)
            writer = self._pool.sources.writer
            if writer is None or writer[0] not in pairing.offered:
                raise _not_offered(writer[0] if writer else "any transport that writes")
            with pairing.working(), _transfer_errors():
                return await writer[1].write(request, pairing.pairing)
        finally:
            # Writers return only once they have stopped; where this cannot be sent decode does not believe it.
            context.set_trailing_metadata(((STOPPED, "1"),))

    async def WatchLoad(self, request: prefill_pb2.PrefillServiceWatchLoadRequest, context: AnyContext) -> None:
        """See prefill.proto."""
        # On their own: a drain that cuts off the first message would leave gRPC unable to send its status.
        await context.send_initial_metadata(())
        async with aclosing(self._load.reports()) as reports:
            async for report in reports:
                await context.write(prefill_pb2.PrefillServiceWatchLoadResponse(load=report))

    async def GetMemoryReport(
        self, request: prefill_pb2.PrefillServiceGetMemoryReportRequest, context: AnyContext
    ) -> prefill_pb2.PrefillServiceGetMemoryReportResponse:
        """See prefill.proto."""
        with engine_errors():
            report = await self._pool.engine.report()
        memory = memory_report(report, num_holds=len(self._pool.holds), num_active_rpcs=self._active.num)
        return prefill_pb2.PrefillServiceGetMemoryReportResponse(memory=memory)

    def add_to(self, server: RpcServer) -> None:
        """Registers all RPCs."""
        server.add(_add_with_raw_read_kv, self, SERVICE)


async def _first_message(context: AnyContext) -> Any:
    """Sends the headers meanwhile: a first response that is cut off when the pairing ends would leave gRPC unable to send the status, and decode waiting."""
    reading = asyncio.ensure_future(context.read())
    try:
        await context.send_initial_metadata(())
        return await reading
    finally:
        reading.cancel()


@contextmanager
def _transfer_errors() -> Iterator[None]:
    try:
        yield
    except HoldUnknownError as error:
        raise failed_precondition(str(error), {}, reason="HOLD_UNKNOWN") from error
    except NoTransportError as error:
        raise failed_precondition(str(error), {}, reason="NO_TRANSPORT") from error
    except HandoverProtocolError as error:
        raise invalid_argument("first_block", str(error)) from error
    except SourceGoneError as error:
        raise aborted("HOLD_CLOSED", str(error)) from error
    except StalledError as error:
        raise aborted("STALLED", str(error)) from error
    except TransferError as error:
        raise aborted("TRANSFER_FAILED", str(error)) from error


def _not_offered(name: str) -> StatusError:
    return failed_precondition(f"{name} was not offered to this pairing", {}, reason="NO_TRANSPORT")


def _add_with_raw_read_kv(servicer: PrefillServicer, server: grpc.aio.Server) -> None:
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, _RawReadKv(server))


class _RawReadKv:
    """Stands in for a server while the generated code registers its handlers, and takes the serializer from ReadKv's."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers as those of the next call."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """Registers them under the generic name: a registered ReadKv would be found first."""
        typed: Any = handlers["ReadKv"]
        raw: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(typed.unary_stream, typed.request_deserializer, None)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {**handlers, "ReadKv": raw}),))
