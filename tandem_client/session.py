"""What both clients are made of: the connection, the defaults, and what all calls share."""

from __future__ import annotations

import threading
from typing import TypeVar
from weakref import WeakSet

from tandem.v1 import gateway_pb2
from tandem_client.async_stream import AsyncStream
from tandem_client.attempts import Attempts
from tandem_client.connection import Connection
from tandem_client.generation import Generation
from tandem_client.options import Options
from tandem_client.retry_budget import RetryBudget
from tandem_client.retry_policy import RetryPolicy
from tandem_client.stream import Stream
from tandem_client.tls import TlsConfig

_Stream = TypeVar("_Stream", Stream, AsyncStream)


class Session:
    """Opens nothing by itself."""

    def __init__(
        self,
        target: str,
        *,
        tls: bool | TlsConfig = False,
        api_key: str | None = None,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        plaintext_api_key: bool = False,
    ) -> None:
        """Connects when the first call is made. Raises ValueError, and OSError for files of `tls` that cannot be read.

        target: host:port, or any of gRPC's target names; all addresses behind a DNS name are used in turn.
        tls: True for a gateway whose certificate a public authority has signed.
        api_key: goes with every call as `authorization: Bearer`, encrypted or to this host only, unless `plaintext_api_key`.
        timeout_s: default deadline of a call, retries and resumes included. None: the gateway's own limit.
        """
        config = TlsConfig() if tls is True else tls or None
        self._connection = Connection(target, config, api_key, plaintext_api_key)
        self.retry = retry or RetryPolicy()
        self.timeout_s = timeout_s
        self._credentials = self._connection.credentials
        self._opening = threading.Lock()  # calls may come from several threads at once
        self._closed = threading.Event()
        self._streams: WeakSet[Stream | AsyncStream] = WeakSet()
        self._budget = RetryBudget(self.retry.max_budget, self.retry.budget_ratio)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        """A call's; `timeout_s` None: the default. Raises ValueError."""
        return Attempts(self.retry, self._budget, self.timeout_s if timeout_s is None else timeout_s)

    def _watch(self, stream: _Stream) -> _Stream:
        """Has `close` end a stream."""
        with self._opening:
            self._streams.add(stream)
        return stream

    def _cancel_streams(self) -> None:
        with self._opening:
            self._closed.set()
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the client is closed")

    def _generation(self, request: gateway_pb2.GenerateRequest, options: Options) -> Generation:
        """A request's. Raises ValueError."""
        return Generation(request, self._attempts(options.get("timeout_s")))
