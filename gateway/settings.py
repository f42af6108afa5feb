"""What the gateway can be told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gateway.instances import Role
from gateway.limits import AdmissionLimits, RequestLimits
from gateway.pools import Peer
from rpc.settings import ServiceSettings

_PEER = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})=(?P<target>[^\s,=]+:\d{1,5})")
Positive = Annotated[int, Field(ge=1)]


class GatewaySettings(ServiceSettings):
    """The public door of Tandem: tokenizes, admits, queues, routes, streams text."""

    model: Path
    """Directory with tokenizer.json, tokenizer_config.json and config.json; weights are not needed."""
    served_model_name: str = ""
    """Name that requests use; default: the directory's name."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion in tokens; default: the model's own, or the decode pool's if that is shorter."""
    decode: str = ""
    """Decode instances: a comma list of name=host:port."""
    prefill: str = ""
    """Prefill instances: a comma list of name=host:port; empty: decode computes prompts itself."""
    http_port: Annotated[int, Field(ge=-1, le=65535)] = -1
    """Port of the OpenAI-compatible HTTP door (extra `http`); 0 takes any free one and logs it, -1 serves none."""
    http_host: str = ""
    """Address of the HTTP door; default: --host."""
    http_max_connections: Positive = 4096
    """Most HTTP connections at the same time."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that tokenize long prompts."""
    max_new_tokens: Positive | None = None
    """Most tokens of a completion, and its default; default: what is left of the context."""
    max_samples: Annotated[int, Field(ge=1, le=16)] = 16
    """Highest n of a request."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling defaults for what a request leaves out: auto takes those of the model's generation_config.json, none takes Tandem's own."""
    max_active_requests: Positive = 1024
    """Requests that run at the same time."""
    max_total_kv_tokens: Positive | None = None
    """KV tokens (prompts and reserved output) of all running requests; default: what the pools hold."""
    max_prefill_backlog_tokens: Annotated[int, Field(ge=0)] = 4096
    """A request is sent on only while the instance that computes its prompt has at most this many prompt tokens ahead."""
    max_queue_requests: Annotated[int, Field(ge=0)] = 512
    """Requests that may wait; 0: none waits."""
    max_queue_tokens: Annotated[int, Field(ge=0)] = 2_000_000
    """Prompt tokens of all waiting requests."""
    max_queue_time_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait in the queue."""

    @field_validator("decode", "prefill")
    @classmethod
    def _is_list_of_peers(cls, value: str) -> str:
        for entry in filter(None, map(str.strip, value.split(","))):
            if not _PEER.fullmatch(entry):
                raise ValueError(f"{entry!r} is not of the form name=host:port")
            if not 1 <= int(entry.rpartition(":")[2]) <= 65535:
                raise ValueError(f"{entry!r} has a port that is not from 1 to 65535")
        return value

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [peer.name for peer in self.peers()]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"--decode and --prefill use a name twice: {', '.join(repeated)}")
        if not any(peer.role is Role.DECODE for peer in self.peers()):
            raise ValueError("--decode (environment TANDEM_DECODE) names no instance: give at least one name=host:port")
        return self

    def peers(self) -> list[Peer]:
        """All configured instances."""
        return [*_peers(self.decode, Role.DECODE), *_peers(self.prefill, Role.PREFILL)]

    def request_limits(self) -> RequestLimits:
        """What one request may ask for."""
        return RequestLimits(max_new_tokens=self.max_new_tokens, max_samples=self.max_samples)

    def admission_limits(self) -> AdmissionLimits:
        """What runs and what waits."""
        return AdmissionLimits(
            max_active_requests=self.max_active_requests,
            max_total_kv_tokens=self.max_total_kv_tokens,
            max_prefill_backlog_tokens=self.max_prefill_backlog_tokens,
            max_queue_requests=self.max_queue_requests,
            max_queue_tokens=self.max_queue_tokens,
            max_queue_time_s=self.max_queue_time_s,
        )


def _peers(text: str, role: Role) -> list[Peer]:
    found = [_PEER.fullmatch(entry.strip()) for entry in text.split(",")]
    return [Peer(match["name"], match["target"], role) for match in found if match is not None]
