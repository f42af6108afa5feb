"""What a gateway tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import gateway_pb2, kv_pb2, load_pb2


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    id: str
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: gateway_pb2.Model) -> Model:
        """From the gateway's message."""
        return cls(model.id, model.max_model_len, model.vocab_size, tuple(model.eos_token_ids))


@dataclass(frozen=True, slots=True)
class KvPath:
    """How KV gets to a decode instance from a prefill instance."""

    prefill_instance: str
    transport: str
    """Empty when they are not paired."""
    bytes_per_s: float
    """As probed when they were paired."""
    reason: str
    """Why not at all, or not by a transport preferred to it."""

    @classmethod
    def of(cls, path: kv_pb2.KvPath) -> KvPath:
        """From the gateway's message."""
        return cls(path.prefill_instance, path.transport, path.bytes_per_s, path.reason)


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's last report; all zero before the first one."""

    model: str
    num_requests_running: int
    num_requests_waiting: int
    num_requests_in_handover: int
    """Sequences whose KV is on its way (decode) or held for a reader (prefill)."""
    prefill_backlog_tokens: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that an allocation could take now, cached prefixes included."""
    block_size: int
    """Tokens to a block."""
    kv_paths: tuple[KvPath, ...]
    """Of a decode instance."""

    @classmethod
    def of(cls, load: load_pb2.LoadReport) -> Load:
        """From the gateway's message."""
        return cls(
            load.model,
            load.num_requests_running,
            load.num_requests_waiting,
            load.num_requests_in_handover,
            load.prefill_backlog_tokens,
            load.num_blocks,
            load.num_free_blocks,
            load.block_size,
            tuple(KvPath.of(path) for path in load.kv_paths),
        )


_ROLES = {gateway_pb2.INSTANCE_ROLE_PREFILL: "prefill", gateway_pb2.INSTANCE_ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Instance:
    """One worker as the gateway sees it."""

    name: str
    role: str
    """prefill or decode."""
    available: bool
    """Requests may be routed to it."""
    reason: str
    """Why not."""
    load: Load

    @classmethod
    def of(cls, instance: gateway_pb2.InstanceStatus) -> Instance:
        """From the gateway's message."""
        return cls(instance.name, _ROLES.get(instance.role, "unknown"), instance.available, instance.reason, Load.of(instance.load))


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """The gateway's view of itself and of both pools."""

    version: str
    num_requests_running: int
    """Admitted and not yet ended."""
    num_requests_waiting: int
    """In the queue."""
    draining: bool
    """New requests are refused."""
    instances: tuple[Instance, ...]

    @classmethod
    def of(cls, status: gateway_pb2.GetStatusResponse) -> GatewayStatus:
        """From the gateway's message."""
        instances = tuple(Instance.of(instance) for instance in status.instances)
        return cls(status.version, status.num_requests_running, status.num_requests_waiting, status.draining, instances)
