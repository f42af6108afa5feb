"""The gateway put together from its parts."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry

from gateway.admission import Admission
from gateway.course import Parts
from gateway.door import SERVICE, add_gateway_service, wire_limits
from gateway.generation import Generations
from gateway.instances import Instance, Role
from gateway.ledger import Ledger
from gateway.limits import AdmissionLimits, RequestLimits
from gateway.pools import Peer, Pools
from gateway.router import Router
from gateway.served_model import ServedModel
from gateway.servicer import GatewayServicer
from rpc.server import RpcServer
from telemetry.metrics import GatewayMetrics


class Door(Protocol):
    """Another way in beside gRPC."""

    async def start(self) -> int:
        """Serves. Returns the port, raises StartupError."""

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests, waits for running ones, ends the rest after `grace_s`, and stops."""


class Gateway:
    """Pools, admission and the gRPC door of one model. Construct it on the event loop; it serves from `start` to `stop`."""

    def __init__(
        self,
        model: ServedModel,
        peers: list[Peer],
        server: RpcServer,
        *,
        request_limits: RequestLimits,
        admission_limits: AdmissionLimits,
        max_request_time_s: float,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.server = server
        self.model = model
        self.request_limits = request_limits
        self.max_request_time_s = max_request_time_s
        self.ledger = Ledger()
        self.pools = Pools(peers, model, self._instance_changed)
        router = Router(
            self.pools.instances,
            self.ledger,
            max_prefill_backlog_tokens=admission_limits.max_prefill_backlog_tokens,
            max_total_kv_tokens=admission_limits.max_total_kv_tokens,
        )
        self.admission = Admission(admission_limits, self.ledger, router, time.monotonic)
        self.generations = Generations(Parts(model, self.pools, self.admission, request_limits, GatewayMetrics(model.name, registry)))
        self._ready: bool | None = None
        self._doors: list[Door] = []
        servicer = GatewayServicer(model, self.generations, self.pools, self.admission, max_request_time_s=max_request_time_s, draining=lambda: server.draining)
        server.add(lambda door, listening: add_gateway_service(door, listening, wire_limits(model, request_limits)), servicer, SERVICE.full_name)

    @property
    def ready(self) -> bool:
        """Each configured pool has an available instance, and new requests are taken."""
        return bool(self._ready) and not self.server.draining

    def add_door(self, door: Door) -> None:
        """Opens and drains another door with the gRPC one; before `start`."""
        self._doors.append(door)

    async def start(self) -> int:
        """Serves and begins to watch the pools; ready once each configured pool has an available instance. Returns the port, raises StartupError."""
        port = await self.server.start()
        for door in self._doors:
            await door.start()
        await self.pools.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Drains all doors at the same time and lets go of the pools."""
        await asyncio.gather(self.server.drain(grace_s), *(door.drain(grace_s) for door in self._doors))
        await self.pools.stop()
        self.model.tokenizer.close()

    def _instance_changed(self, instance: Instance) -> None:
        if instance.role is Role.DECODE:
            if instance.available and instance.load is not None:
                self.ledger.report(instance.name, num_blocks=instance.load.num_blocks, num_free=instance.load.num_free_blocks)
            else:
                self.ledger.forget(instance.name)
        self.admission.instances_changed()
        missing = self.pools.missing()
        if self._ready is not (not missing):
            self._ready = not missing
            self.server.set_ready(not missing, missing)
