"""Three real services for a check, with clients of all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.stack import Stack, StackOptions
from rpc.channels import control_channel
from tandem.v1 import decode_pb2, decode_pb2_grpc, gateway_pb2_grpc, load_pb2, prefill_pb2, prefill_pb2_grpc

_READY_S, _DRAIN_S, _REPORT_S = 120.0, 30.0, 10.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running stack of one prefill and one decode instance behind a gateway."""

    stack: Stack
    gateway: gateway_pb2_grpc.GatewayServiceStub
    decode: decode_pb2_grpc.DecodeServiceStub
    prefill: prefill_pb2_grpc.PrefillServiceStub

    async def memory(self) -> dict[str, load_pb2.MemoryReport]:
        """Who holds what in both pools, now."""
        of_decode = await self.decode.GetMemoryReport(decode_pb2.DecodeServiceGetMemoryReportRequest(), timeout=_REPORT_S)
        of_prefill = await self.prefill.GetMemoryReport(prefill_pb2.PrefillServiceGetMemoryReportRequest(), timeout=_REPORT_S)
        return {"decode": of_decode.memory, "prefill": of_prefill.memory}


def num_held(report: load_pb2.MemoryReport) -> int:
    """Everything that somebody still has: blocks, sequences, holds, readers."""
    return report.num_held_blocks + sum(report.sequences_by_state.values()) + report.num_holds + report.num_readers


@asynccontextmanager
async def running_cluster(options: StackOptions, log: Path) -> AsyncIterator[Cluster]:
    """Starts the stack, waits until it is ready, and drains it at the end; the services' lines go to `log`."""
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as file:
        stack = Stack(options, lambda name, line: print(f"{name:<10}| {line}", file=file, flush=True))
        try:
            await stack.start()
            await stack.wait_until_ready(_READY_S)
            async with AsyncExitStack() as channels:
                to = {name: await channels.enter_async_context(control_channel(address)) for name, address in stack.addresses.items()}
                yield Cluster(
                    stack,
                    gateway_pb2_grpc.GatewayServiceStub(to["gateway"]),
                    decode_pb2_grpc.DecodeServiceStub(to["decode-0"]),
                    prefill_pb2_grpc.PrefillServiceStub(to["prefill-0"]),
                )
        finally:
            await stack.drain(_DRAIN_S)
