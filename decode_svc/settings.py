"""Settings of a decode worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, field_validator

from decode_svc.peers import MAX_BYTES_IN_FLIGHT, MAX_TOTAL_BYTES_IN_FLIGHT, MIN_BYTES_PER_S, KvSettings, parse_targets
from decode_svc.pool import FailurePolicy
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.readers import check_names
from kvtransfer.transport import NAMES
from worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Tandem decode worker: reserves blocks, has prompts computed by prefill workers, generates tokens. Without prefill workers it serves alone."""

    prefill: str = ""
    """Prefill instances as name=host:port,...; the gateway has the same list."""
    max_prefill_attempts: Annotated[int, Field(ge=1)] = 2
    """Prefill instances that are tried for a prompt, each once."""
    max_local_prefill_tokens: Annotated[int, Field(ge=0)] = 2048
    """Longest prompt that decode computes itself when prefill instances have failed."""
    kv_transports: str = ",".join(NAMES)
    """How KV may be read, by preference; those that this host cannot have are left out, and `tandem status` says why."""
    kv_checksum: bool = False
    """Ask for a digest of every KV block and refuse blocks without one."""
    kv_min_bandwidth: Annotated[ByteSize, Field(ge=0)] = ByteSize(MIN_BYTES_PER_S)
    """Bytes per second, as 50MB: a transport that was tried and is slower is taken only when no other one is faster."""
    max_kv_bytes_in_flight: Annotated[ByteSize, Field(ge=1)] = ByteSize(MAX_BYTES_IN_FLIGHT)
    """KV bytes that may be on their way from one prefill instance."""
    max_kv_bytes_in_flight_total: Annotated[ByteSize, Field(ge=1)] = ByteSize(MAX_TOTAL_BYTES_IN_FLIGHT)
    """KV bytes that may be on their way from all prefill instances."""
    kv_socket_dir: Path | None = None
    """Directory of unix sockets, closed to other users and the same for all workers of a host; default: tandem in $XDG_RUNTIME_DIR or in /run, else
    tandem-<uid> in the temporary directory."""

    @field_validator("prefill")
    @classmethod
    def _check_prefill(cls, value: str) -> str:
        parse_targets(value)
        return value

    @field_validator("kv_transports")
    @classmethod
    def _check_transports(cls, value: str) -> str:
        check_names(value.split(","))
        return value

    def policy(self) -> FailurePolicy:
        """What is tried when a prefill instance fails."""
        return FailurePolicy(self.max_prefill_attempts, self.max_local_prefill_tokens)

    def kv(self) -> KvSettings:
        """How KV gets here."""
        return KvSettings(
            transports=tuple(self.kv_transports.split(",")),
            checksum=self.kv_checksum,
            min_bytes_per_s=self.kv_min_bandwidth,
            max_bytes_in_flight=self.max_kv_bytes_in_flight,
            max_total_bytes_in_flight=self.max_kv_bytes_in_flight_total,
            socket_dir=self.kv_socket_dir,
            nixl=NixlSettings(self.nixl_net_devices, self.nixl_tls, self.nixl_direction),
        )
