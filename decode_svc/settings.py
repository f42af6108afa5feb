"""Settings of a decode worker."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from decode_svc.peers import MAX_BYTES_IN_FLIGHT, TRANSPORTS, ReadSettings, parse_targets
from decode_svc.pool import FailurePolicy
from kvtransfer.inline import InlineLimits
from worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Tandem decode worker: reserves blocks, has prompts computed by prefill workers, generates tokens. Without prefill workers it serves alone."""

    prefill: str = ""
    """Prefill instances as name=host:port,...; the gateway has the same list."""
    max_prefill_attempts: Annotated[int, Field(ge=1)] = 2
    """Prefill instances that are tried for a prompt, each once."""
    max_local_prefill_tokens: Annotated[int, Field(ge=0)] = 2048
    """Longest prompt that decode computes itself when prefill instances have failed."""
    transports: str = ",".join(TRANSPORTS)
    """How KV may be read, by preference."""
    kv_checksum: bool = False
    """Ask for a digest with every KV chunk and refuse chunks without one."""
    max_kv_bytes_in_flight: Annotated[int, Field(ge=1)] = MAX_BYTES_IN_FLIGHT
    """KV bytes that may be on their way from one prefill instance."""

    @field_validator("prefill")
    @classmethod
    def _check_prefill(cls, value: str) -> str:
        parse_targets(value)
        return value

    @field_validator("transports")
    @classmethod
    def _check_transports(cls, value: str) -> str:
        for name in value.split(","):
            if name not in TRANSPORTS:
                raise ValueError(f"unknown transport {name!r}, expected some of {', '.join(TRANSPORTS)}")
        return value

    def policy(self) -> FailurePolicy:
        """What is tried when a prefill instance fails."""
        return FailurePolicy(self.max_prefill_attempts, self.max_local_prefill_tokens)

    def reading(self) -> ReadSettings:
        """How blocks are read."""
        return ReadSettings(tuple(self.transports.split(",")), InlineLimits(checksum=self.kv_checksum), self.max_kv_bytes_in_flight)
