"""The client of Tandem: generate, chat and stream from Python, in threads (Client) or in asyncio (AsyncClient)."""

from __future__ import annotations

from tandem_client.async_client import AsyncClient
from tandem_client.async_stream import AsyncStream
from tandem_client.chat import ChatMessage
from tandem_client.client import Client
from tandem_client.completion import Choice, Completion, RequestPath, Usage
from tandem_client.errors import (
    AlreadyInFlight,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    TandemError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from tandem_client.gateway_status import GatewayStatus, Instance, KvPath, Load, Model
from tandem_client.options import Options
from tandem_client.piece import Finish, FinishReason, Piece, TokenLogprob, TopLogprob
from tandem_client.retry_policy import RetryPolicy
from tandem_client.sampling import Sampling
from tandem_client.stream import Stream
from tandem_client.tls import TlsConfig

__all__ = [
    "AlreadyInFlight",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "ChatMessage",
    "Choice",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Finish",
    "FinishReason",
    "GatewayStatus",
    "Instance",
    "Internal",
    "InvalidRequest",
    "KvPath",
    "Load",
    "Model",
    "ModelNotFound",
    "Options",
    "Overloaded",
    "PermissionDenied",
    "Piece",
    "RequestPath",
    "RetryPolicy",
    "Sampling",
    "Stream",
    "TandemError",
    "TlsConfig",
    "TokenLogprob",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Usage",
]
