"""One attempt to pair with a prefill instance: say who decode is, take the offer, choose a path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import grpc

from decode_svc.failures import MAX_DESCRIPTION_CHARS, is_own_cancel
from decode_svc.paired import FailpointPath, Paired
from engine.proto import kv_layout_from_proto, kv_layout_to_proto
from kvtransfer.choice import Chosen, choose
from kvtransfer.conversion import unlike
from kvtransfer.errors import HandoverProtocolError, NoTransportError
from kvtransfer.pairing import NONCE_BYTES, PROCESS_ID, boot_id, sources_by_name
from kvtransfer.path import PathParts
from kvtransfer.readers import Readers
from kvtransfer.transport import KvReader, PreparedReader
from rpc.client import outgoing
from rpc.errors import StatusError
from tandem.v1 import prefill_pb2, prefill_pb2_grpc

_LOG = logging.getLogger(__name__)
_METHOD = "tandem.v1.PrefillService/Pair"
_PREPARE_S = 10.0
_CONNECT_S = 1.0
_ANSWER_S = 15.0  # prefill gives each of its transports 10 s to be offered
_MAX_BLOCK_SIZE = 1 << 16
_T = TypeVar("_T")


class NotPairedError(Exception):
    """There is no pairing with an instance. `pairs` is False when the two pools do not pair, which no other attempt can change as long as both run."""

    def __init__(self, description: str, *, pairs: bool = True) -> None:
        super().__init__(description[:MAX_DESCRIPTION_CHARS])
        self.pairs = pairs


@dataclass(frozen=True, slots=True)
class PairingParts:
    """What all attempts at one instance are made of. Needs no engine."""

    instance: str
    control: grpc.aio.Channel
    """Carries the Pair RPC: one that finds out soon when the peer is gone."""
    path: PathParts
    make_readers: Callable[[Sequence[str]], Readers]
    """New readers for one attempt, of these transports, by preference."""
    transports: Sequence[str]
    """By preference."""
    min_bytes_per_s: float
    """A transport whose probe is slower is taken only when no other one is faster."""
    device_uuid: str = ""
    """The GPU that decode's pool is on; empty for host memory."""


@dataclass(slots=True)
class PairingAttempt:
    """`run` is its whole life: what it opened is closed unless it ends up in what it returns."""

    parts: PairingParts
    readers: Readers
    start: prefill_pb2.PairStart = field(init=False, repr=False)

    @classmethod
    def of(cls, parts: PairingParts, transports: Sequence[str]) -> Self:
        """An attempt by these transports."""
        return cls(parts, parts.make_readers(transports))

    async def run(self) -> tuple[Paired, dict[str, str]]:
        """The pairing, and why the transports in front of the one that was chosen were not. Raises NotPairedError."""
        try:
            return await self._run()
        except BaseException:
            for reader in self.readers.usable:
                reader.close()
            raise

    async def _run(self) -> tuple[Paired, dict[str, str]]:
        await self._prepare()
        self._greet()
        # A channel that could not connect answers for a while without trying again; what is said here should be true now.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                await self.parts.control.channel_ready()
        with outgoing(_METHOD) as (metadata, _):
            call = prefill_pb2_grpc.PrefillServiceStub(self.parts.control).Pair(metadata=metadata)
        try:
            return await self._converse(call)
        except BaseException:
            call.cancel()
            raise

    async def _prepare(self) -> None:
        usable, unusable = list[KvReader](), dict(self.readers.unusable)
        for reader in self.readers.usable:
            try:
                if isinstance(reader, PreparedReader):
                    async with asyncio.timeout(_PREPARE_S):
                        await reader.prepare()
                usable.append(reader)
            except Exception as error:  # what a library does beyond its promises costs its own transport, not the pairing
                reader.close()
                unusable[reader.name] = self._why_not(reader.name, error)
        self.readers = Readers(usable, unusable)

    def _why_not(self, name: str, error: Exception) -> str:
        if isinstance(error, NoTransportError):
            return str(error)
        if isinstance(error, TimeoutError):
            return f"it was not ready within {_PREPARE_S:g} s"
        _LOG.error("transport %s failed while it was prepared", name, exc_info=error)
        return f"{type(error).__name__}: {error}"

    def _greet(self) -> None:
        if not self.readers.usable:
            raise NotPairedError(f"decode can use no transport: {_list(self.readers.unusable)}", pairs=False)
        self.start = prefill_pb2.PairStart(
            layout=kv_layout_to_proto(self.parts.path.layout),
            process_id=PROCESS_ID,
            boot_id=boot_id(),
            device_uuid=self.parts.device_uuid,
            transports=[reader.name for reader in self.readers.usable],
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        for reader in self.readers.usable:
            reader.greet(self.start)

    async def _converse(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> tuple[Paired, dict[str, str]]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await _spoken(call, call.write(prefill_pb2.PairRequest(start=self.start)))
                offer = await _spoken(call, call.read())
        except TimeoutError:
            raise NotPairedError(f"prefill did not answer for {_ANSWER_S:g} s") from None
        if not isinstance(offer, prefill_pb2.PairResponse):
            raise NotPairedError("prefill ended the pairing before its offer")
        self._check(offer)
        ended = asyncio.ensure_future(call.read())
        ended.add_done_callback(_look_at)
        chosen = await self._choose(offer, ended)
        choice = prefill_pb2.PairChoice(transport=chosen.reader.name, bytes_per_s=chosen.bytes_per_s)
        await _spoken(call, call.write(prefill_pb2.PairRequest(choice=choice)))
        path = FailpointPath(self.parts.path, chosen.reader, kv_layout_from_proto(offer.layout), chosen.bytes_per_s)
        return Paired(offer.pairing_id, path, chosen.reader, call, ended), {**self.readers.unusable, **chosen.reasons}

    def _check(self, offer: prefill_pb2.PairResponse) -> None:
        own, layout = self.parts.path.layout, kv_layout_from_proto(offer.layout)
        differences = unlike(own, layout)
        if differences:
            texts = ", ".join(f"{name} (decode has {mine}, prefill has {other})" for name, (mine, other) in differences.items())
            raise NotPairedError(f"KV layouts differ in {texts}", pairs=False)
        if not offer.pairing_id or len(offer.nonce) != NONCE_BYTES or not offer.num_blocks:
            raise NotPairedError("prefill's offer names no pairing, no nonce or no blocks")
        if layout.block_size > _MAX_BLOCK_SIZE:
            raise NotPairedError(f"prefill's blocks are of {layout.block_size} tokens, more than {_MAX_BLOCK_SIZE}")

    async def _choose(self, offer: prefill_pb2.PairResponse, ended: asyncio.Future[Any]) -> Chosen:
        choosing = asyncio.ensure_future(choose(offer, self.readers.usable, min_bytes_per_s=self.parts.min_bytes_per_s))
        try:
            await asyncio.wait({choosing, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not choosing.done():
                raise NotPairedError("prefill ended the pairing while paths were tried")
            return choosing.result()
        except (NoTransportError, HandoverProtocolError) as error:
            # What nobody offers stays so; what failed when it was tried may not fail again.
            common = {reader.name for reader in self.readers.usable} & set(sources_by_name(offer))
            raise NotPairedError(f"no transport: {_list({**self.readers.unusable, '': str(error)})}", pairs=bool(common)) from error
        finally:
            if not choosing.done():
                choosing.cancel()
                await asyncio.wait({choosing})
            _look_at(choosing)


async def _spoken(call: grpc.aio.StreamStreamCall[Any, Any], step: Awaitable[_T]) -> _T:
    """A step of the conversation. Raises NotPairedError when the RPC has ended, with what it ended with."""
    try:
        try:
            return await step
        except asyncio.InvalidStateError:  # a write to an RPC that has ended, and its status says why
            await call.read()
            raise NotPairedError("prefill ended the pairing") from None
    except grpc.aio.AioRpcError as error:
        raise _refused(error) from error
    except asyncio.CancelledError:
        if is_own_cancel():
            raise
        raise NotPairedError("prefill ended the pairing with CANCELLED") from None


def _refused(error: grpc.aio.AioRpcError) -> NotPairedError:
    status = StatusError.of(error)
    return NotPairedError(f"{status.code.name} {status.message}", pairs=error.code() is not grpc.StatusCode.FAILED_PRECONDITION)


def _list(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" if name else reason for name, reason in reasons.items())


def _look_at(future: asyncio.Future[Any]) -> None:
    """A failure that nobody waits for is not reported as lost."""
    if not future.cancelled() and future.done():
        future.exception()
