"""What a fork server imports before it forks workers: nothing that starts a thread, opens a channel or draws the number that tells one process from another."""

from __future__ import annotations

import gc
from importlib import import_module

for _name in (
    *("torch", "engine.build", "engine.async_engine", "rpc.service", "rpc.server", "rpc.channels"),
    *("tandem.v1.prefill_pb2_grpc", "tandem.v1.decode_pb2_grpc", "grpc_health.v1.health_pb2_grpc"),
):
    import_module(_name)
# A worker looks through its heap once it has started: not through all of this.
gc.collect()
gc.freeze()
