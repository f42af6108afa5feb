"""Pair RPCs: which decode instances work with this pool, by which transports, and what ends with them.

An RPC that works under a pairing (Prefill, ReadKv, WriteKv) ends with it, ABORTED PAIRING_ENDED: its blocks are given back and nobody can read them under
another pairing, since a hold is found only under its own one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from engine.kv_cache import KvLayout
from engine.proto import kv_layout_from_proto, kv_layout_to_proto
from kvtransfer.conversion import unlike
from kvtransfer.errors import HandoverError
from kvtransfer.host_pool import HostPool
from kvtransfer.pairing import NONCE_BYTES, Pairing
from kvtransfer.sources import Sources
from kvtransfer.transport import KvSource
from rpc.deadline import at_most
from rpc.errors import StatusError, aborted, exhausted, failed_precondition, invalid_argument
from tandem.v1 import prefill_pb2

_log = logging.getLogger(__name__)
MAX_PAIRINGS = 256
_RETRY_S = 1.0
_MAX_START_S = 10.0
"""Time for decode's first message, and for a source's offer."""
_MAX_TRANSPORTS = 16
_MAX_NAME_CHARS = 64
_MAX_AGENT_BYTES = 64 << 10
_MAX_REASON_CHARS = 256

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What decode is told of the pool."""

    layout: KvLayout
    num_blocks: int
    probe_bytes: int
    probe_digest: int

    @classmethod
    def of(cls, pool: HostPool) -> PoolFacts:
        """Those of a pool in host memory."""
        return cls(pool.kv_cache.layout, pool.kv_cache.num_blocks, len(pool.probe), pool.probe_digest)


class OpenPairing:
    """A pairing whose RPC lives. Lives on the event loop."""

    def __init__(self, pairing: Pairing, peer: str) -> None:
        self.pairing = pairing
        self.peer = peer
        self.offered: Mapping[str, KvSource] = {}
        """The sources that were offered to decode, by their transport's name."""
        self.chosen = ""
        """The transport that decode reads by."""
        self._working: set[asyncio.Task[Any]] = set()
        self._ended = asyncio.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """The body belongs to the pairing: when that ends first, the body is cancelled. Raises StatusError ABORTED PAIRING_ENDED."""
        task = asyncio.current_task()
        assert task is not None
        if self._ended.is_set():
            raise _pairing_ended()
        cancelling = task.cancelling()
        self._working.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._ended.is_set() and task.cancelling() - 1 <= cancelling:
                raise _pairing_ended() from None  # nobody else cancelled it
            raise
        finally:
            if self._ended.is_set():
                task.uncancel()
            self._working.discard(task)

    def end(self) -> None:
        """Ends what works under it. No await; called once."""
        self._ended.set()
        for task in self._working:
            task.cancel()


class Pairings:
    """The open pairings of one pool, by id. Needs no engine. Lives on the event loop."""

    def __init__(self, facts: PoolFacts, sources: Sources, *, max_pairings: int = MAX_PAIRINGS) -> None:
        self._facts = facts
        self._sources = sources
        self._max_pairings = max_pairings
        self._num_served = 0
        self._open: dict[str, OpenPairing] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, pairing_id: str) -> OpenPairing:
        """An open pairing. Raises StatusError FAILED_PRECONDITION PAIRING_UNKNOWN: decode has to pair again."""
        pairing = self._open.get(pairing_id)
        if pairing is None:
            raise failed_precondition("no such pairing", {}, reason="PAIRING_UNKNOWN")
        return pairing

    async def serve(self, context: Context) -> None:
        """The Pair RPC: returns when decode has gone. Raises StatusError; whatever ends it, the pairing and all that works under it end too."""
        with self._one():
            async with at_most(_MAX_START_S, "pair"):
                request = await context.read()
            pairing = OpenPairing(Pairing(self._checked(request)), context.peer())
            self._open[pairing.pairing.pairing_id] = pairing
            try:
                await context.write(await self._offer(pairing))
                await self._listen(context, pairing)
            finally:
                self._close(pairing)

    @contextmanager
    def _one(self) -> Iterator[None]:
        if self._num_served >= self._max_pairings:
            raise exhausted("TOO_MANY_PAIRINGS", f"the instance has {self._num_served} pairings, its limit", _RETRY_S)
        self._num_served += 1
        try:
            yield
        finally:
            self._num_served -= 1

    def _checked(self, request: Any) -> prefill_pb2.PairStart:
        if request is grpc.aio.EOF or request.WhichOneof("step") != "start":
            raise invalid_argument("step", "the first message must be start")
        start: prefill_pb2.PairStart = request.start
        check_start(start)
        differences = unlike(self._facts.layout, kv_layout_from_proto(start.layout))
        if differences:
            texts = {name: f"prefill has {own}, decode has {other}" for name, (own, other) in differences.items()}
            raise failed_precondition(f"KV layouts differ in {', '.join(texts)}", texts)
        return start

    async def _offer(self, pairing: OpenPairing) -> prefill_pb2.PairResponse:
        facts = self._facts
        response = prefill_pb2.PairResponse(
            pairing_id=pairing.pairing.pairing_id,
            layout=kv_layout_to_proto(facts.layout),
            nonce=pairing.pairing.nonce,
            num_blocks=facts.num_blocks,
            probe_bytes=facts.probe_bytes,
            probe_digest=facts.probe_digest,
        )
        offered: dict[str, KvSource] = {}
        for name in dict.fromkeys(pairing.pairing.start.transports):
            try:
                response.sources.append(await self._offer_of(name, pairing.pairing))
            except HandoverError as error:
                response.refusals[name] = str(error)[:_MAX_REASON_CHARS]
            else:
                offered[name] = self._sources.by_name[name]
        pairing.offered = offered
        refused = "; ".join(f"{name}: {reason}" for name, reason in sorted(response.refusals.items()))
        _log.info("%s has paired and is offered %s%s", pairing.peer, ", ".join(offered) or "no transport", f" (not {refused})" if refused else "")
        return response

    async def _offer_of(self, name: str, pairing: Pairing) -> Any:
        """Raises HandoverError with the reason why there is none."""
        if name not in self._sources.by_name:
            raise HandoverError(self._sources.missing.get(name, "prefill does not offer it"))
        try:
            async with asyncio.timeout(_MAX_START_S):
                return await self._sources.by_name[name].offer(pairing)
        except HandoverError:
            raise
        except TimeoutError:
            raise HandoverError(f"prefill could not offer it within {_MAX_START_S:g} s") from None
        except Exception as error:  # a fault of one transport leaves the other ones
            _log.exception("transport %s could not be offered", name)
            raise HandoverError("prefill could not offer it: internal error") from error

    async def _listen(self, context: Context, pairing: OpenPairing) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.WhichOneof("step") != "choice":
                raise invalid_argument("step", "only choice may follow start")
            self._take(request.choice, pairing)

    def _take(self, choice: prefill_pb2.PairChoice, pairing: OpenPairing) -> None:
        if choice.transport not in pairing.offered:
            raise invalid_argument("choice.transport", "is none that was offered")
        if not (math.isfinite(choice.bytes_per_s) and choice.bytes_per_s >= 0):
            raise invalid_argument("choice.bytes_per_s", f"is {choice.bytes_per_s}")
        rate = choice.bytes_per_s / 1e9
        if pairing.chosen and pairing.chosen != choice.transport:
            _log.warning("%s has changed its path from %s to %s (%.3f GB/s)", pairing.peer, pairing.chosen, choice.transport, rate)
        else:
            _log.info("%s reads by %s (%.3f GB/s)", pairing.peer, choice.transport, rate)
        pairing.chosen = choice.transport

    def _close(self, pairing: OpenPairing) -> None:
        del self._open[pairing.pairing.pairing_id]
        pairing.end()
        for name, source in self._sources.by_name.items():
            try:
                source.withdraw(pairing.pairing.pairing_id)
            except Exception:  # the other ones have to hear of it too
                _log.exception("transport %s could not be withdrawn", name)
        _log.info("%s is no longer paired", pairing.peer)


def check_start(start: prefill_pb2.PairStart) -> None:
    """Raises StatusError INVALID_ARGUMENT that names the field. Layouts are not looked at."""
    for name in ("process_id", "boot_id", "device_uuid"):
        if len(getattr(start, name)) > _MAX_NAME_CHARS:
            raise invalid_argument(f"start.{name}", f"is longer than {_MAX_NAME_CHARS} characters")
    if not 0 < len(start.transports) <= _MAX_TRANSPORTS:
        raise invalid_argument("start.transports", f"must be 1 to {_MAX_TRANSPORTS}, got {len(start.transports)}")
    if not all(0 < len(name) <= _MAX_NAME_CHARS for name in start.transports):
        raise invalid_argument("start.transports", f"must be names of 1 to {_MAX_NAME_CHARS} characters")
    if len(start.nonce) != NONCE_BYTES:
        raise invalid_argument("start.nonce", f"must be {NONCE_BYTES} bytes, got {len(start.nonce)}")
    staging = start.nixl_staging
    if len(staging.agent_metadata) > _MAX_AGENT_BYTES:
        raise invalid_argument("start.nixl_staging", f"agent_metadata is longer than {_MAX_AGENT_BYTES} bytes")
    if staging.base_address + staging.num_slots * staging.slot_bytes >= 1 << 64:
        raise invalid_argument("start.nixl_staging", "is not within an address space")


def _pairing_ended() -> StatusError:
    return aborted("PAIRING_ENDED", "the pairing has ended")
