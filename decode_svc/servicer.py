"""DecodeService."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import grpc

from decode_svc.generation import Generation
from decode_svc.job import Job
from decode_svc.pool import DecodePool
from rpc.deadline import at_most
from rpc.errors import failed_precondition
from rpc.server import RpcServer
from tandem.v1 import decode_pb2, decode_pb2_grpc
from worker.active import ActiveRequests
from worker.load import LoadWatch, memory_report
from worker.statuses import engine_errors

SERVICE = "tandem.v1.DecodeService"
AnyContext = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves one pool. Every Generate RPC is the reservation of its blocks."""

    def __init__(self, pool: DecodePool, load: LoadWatch, *, max_active_requests: int = 1024) -> None:
        self._pool = pool
        self._load = load
        self._active = ActiveRequests(max_active_requests)

    async def Generate(self, request: decode_pb2.DecodeServiceGenerateRequest, context: AnyContext) -> None:
        """See decode.proto."""
        with self._active.one():
            name = request.prefill_instance
            if name and name not in self._pool.peers:
                raise failed_precondition("this instance knows no such prefill instance", {"prefill_instance": name[:256]}, reason="UNKNOWN_INSTANCE")
            async with at_most(self._pool.max_request_time_s, "decode"):
                job = Job.of(request, self._pool.engine.model, self._pool.engine.limits)
                await Generation(self._pool, job, name, context).run()

    async def WatchLoad(self, request: decode_pb2.DecodeServiceWatchLoadRequest, context: AnyContext) -> None:
        """See decode.proto."""
        # On their own: a drain that cuts off the first message would leave gRPC unable to send its status.
        await context.send_initial_metadata(())
        async with aclosing(self._load.reports()) as reports:
            async for report in reports:
                await context.write(decode_pb2.DecodeServiceWatchLoadResponse(load=report))

    async def GetMemoryReport(
        self, request: decode_pb2.DecodeServiceGetMemoryReportRequest, context: AnyContext
    ) -> decode_pb2.DecodeServiceGetMemoryReportResponse:
        """See decode.proto."""
        with engine_errors():
            report = await self._pool.engine.report()
        num_reservations = report.sequences_by_state.get("waiting_for_kv", 0)
        memory = memory_report(report, num_holds=num_reservations, num_active_rpcs=self._active.num)
        return decode_pb2.DecodeServiceGetMemoryReportResponse(memory=memory)

    def add_to(self, server: RpcServer) -> None:
        """Registers all RPCs."""
        server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, self, SERVICE)
