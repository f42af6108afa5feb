"""`tandem status` and `tandem health`: what runs, and whether it serves."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.generation import gateway_client, told
from rpc.channels import control_channel
from tandem_client import GatewayStatus, TandemError


class Health(IntEnum):
    """Exit codes of `tandem health`."""

    SERVING = 0
    NOT_SERVING = 1
    UNREACHABLE = 2


async def check_health(target: str, service: str, timeout_s: float) -> tuple[Health, str]:
    """Asks grpc.health.v1 once; the text says what was answered. An unknown service is not serving."""
    async with control_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return Health.NOT_SERVING, f"service {service} is unknown"
            return Health.UNREACHABLE, f"{error.code().name}: {error.details()}"
    answer = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return (Health.SERVING if answer == "SERVING" else Health.NOT_SERVING), answer


async def print_status(target: str, timeout_s: float, console: Console) -> None:
    """Prints the gateway's view of itself and of both pools. Raises UserError."""
    async with gateway_client(target) as client:
        try:
            status = await client.status(timeout_s=timeout_s)
        except TandemError as error:
            raise told(error, target) from None
    counts = f"{status.num_requests_running} running, {status.num_requests_waiting} in the queue"
    console.print(f"gateway {target}, version {status.version}: {counts}{', draining' if status.draining else ''}", highlight=False)
    models = sorted({instance.load.model for instance in status.instances if instance.load.model})
    console.print(f"model {', '.join(models) or 'unknown'}", highlight=False)
    console.print(_instances(status))
    console.print("moving: KV on its way or held for a reader; backlog: prompt tokens not yet computed", style="dim", highlight=False)
    if any(instance.load.kv_paths for instance in status.instances):
        console.print()
        console.print(_kv_paths(status))


def _instances(status: GatewayStatus) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("instance", "pool", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "moving", "backlog", "blocks used"):
        table.add_column(name, justify="right", no_wrap=True)
    for instance in sorted(status.instances, key=lambda one: (one.role, one.name)):
        load = instance.load
        used = f"{load.num_blocks - load.num_free_blocks} / {load.num_blocks}" if load.num_blocks else "-"
        table.add_row(
            Text(instance.name),
            instance.role,
            Text("ready", "green") if instance.available else Text(instance.reason or "not available", "red"),
            str(load.num_requests_running),
            str(load.num_requests_waiting),
            str(load.num_requests_in_handover),
            str(load.prefill_backlog_tokens),
            used,
        )
    return table


def _kv_paths(status: GatewayStatus) -> Table:
    """A row for each pair: how KV gets to a decode instance from a prefill instance; the reason says why not at all, or not by a transport preferred to it."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("KV to", "from", "by"):
        table.add_column(name, no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for instance in sorted(status.instances, key=lambda one: one.name):
        for path in sorted(instance.load.kv_paths, key=lambda one: one.prefill_instance):
            by = Text(path.transport, "green") if path.transport else Text("not paired", "red")
            rate = f"{path.bytes_per_s / 1e9:.2f}" if path.transport else "-"
            table.add_row(Text(instance.name), Text(path.prefill_instance), by, rate, Text(path.reason))
    return table
