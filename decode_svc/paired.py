"""One open pairing with a prefill instance: the Pair RPC that it is, and the path that was chosen under it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kvtransfer.errors import TransferError
from kvtransfer.path import Destination, KvPath
from kvtransfer.transport import KvReader, PerishableReader
from rpc.failpoints import failpoint
from tandem.v1 import kv_pb2
from telemetry.spans import KV_TRANSFER

MAX_FAILURES = 3
"""Hand-overs in a row that a transport may fail before another one is chosen."""


@dataclass(frozen=True, slots=True)
class PathEvent:
    """The path from an instance has become another one (transport; empty: not paired), or, when both are the same, what is said of it has."""

    instance: str
    old: str
    new: str
    bytes_per_s: float
    reason: str
    first: bool = False
    """The first path since the start: no change of one."""


class FailpointPath(KvPath):
    """A path behind the failpoint of its runs."""

    async def read(self, ready: kv_pb2.KvReady, to: Destination) -> None:
        """See KvPath."""
        await failpoint(KV_TRANSFER)
        await super().read(ready, to)


class Paired:
    """Open until the RPC ends by whatever, or until it is retired and nobody uses it any more. Lives on the event loop."""

    def __init__(self, pairing_id: str, path: KvPath, reader: KvReader, call: grpc.aio.StreamStreamCall[Any, Any], ended: asyncio.Future[Any]) -> None:
        """`ended` is the read that only the end of the RPC, or what the protocol does not allow, completes."""
        self.pairing_id = pairing_id
        self.path = path
        self.news: PathEvent | None = None
        """What made this the path, as long as no request has told of it."""
        self.ended = ended
        self.failing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why another transport should be chosen, once it should."""
        self._reader = reader
        self._call = call
        self._lost = ""
        self._retired = False
        self._num_users = 0
        self._num_failures = 0
        ended.add_done_callback(lambda _: self.close())

    @property
    def is_open(self) -> bool:
        """New requests may use it."""
        return not self._lost and not self.ended.done()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """What happens in the block needs the pairing: one that is retired stays open for it."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._close_if_unused()

    def handed_over(self) -> None:
        """A hand-over that read blocks was confirmed."""
        self._num_failures = 0

    def transfer_failed(self, error: TransferError) -> None:
        """A hand-over failed by the transport's fault while the pairing was intact."""
        if isinstance(self._reader, PerishableReader) and self._reader.lost:
            self.lose(f"{self.path.transport} is lost: {self._reader.lost}")
            return
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES and self.is_open and not self.failing.done():
            self.failing.set_result(f"{self._num_failures} hand-overs in a row failed, the last one: {error}")

    def keep(self) -> None:
        """No other transport can be had: this one gets its chances anew."""
        self._num_failures = 0
        if self.failing.done():
            self.failing = asyncio.get_running_loop().create_future()

    def lose(self, reason: str) -> None:
        """The pairing is of no use any more. Idempotent, no await."""
        self._lost = self._lost or reason
        self._call.cancel()

    def retire(self) -> None:
        """Another one has taken its place: it is closed when its last user has gone."""
        self._retired = True
        self._close_if_unused()

    def close(self) -> None:
        """Ends the RPC, and with it the pairing; the reader takes no new read. Idempotent, no await."""
        self._reader.close()
        self._call.cancel()

    def end_reason(self) -> str:
        """Why it ended, once it has."""
        if self._lost:
            return self._lost
        if self.ended.cancelled():
            return "prefill ended the pairing with CANCELLED"
        error = self.ended.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            return f"the pairing ended with {error.code().name} {error.details()}"
        return f"the pairing ended: {error}" if error else "prefill ended the pairing" if self.ended.result() is grpc.aio.EOF else "prefill spoke out of turn"

    def _close_if_unused(self) -> None:
        if self._retired and not self._num_users:
            self.close()
