"""What a transport is: prefill's source, which offers itself at pairing, and decode's reader, which attaches to the offer, is probed, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvtransfer.memories import BlockMemory
from kvtransfer.pairing import Pairing
from tandem.v1 import kv_pb2, prefill_pb2

NAMES = ("memory", "shared_memory", "cuda_ipc", "nixl", "inline")
"""All transports, the fastest first; the names of the fields of KvSource."""


class References(Protocol):
    """An engine's own references for readers of its memory: from before a reader starts until it can touch the memory no more."""

    async def acquire(self, reader_id: str, seq_id: str, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """Takes references on a run of a live sequence's blocks, on the engine thread; returns their pool ids."""
        ...

    def drop(self, reader_id: str) -> None:
        """Posts the end of a reader: idempotent, in order behind its acquire."""
        ...


class KvSource(Protocol):
    """Prefill's side of one transport, one for all pairings."""

    @property
    def name(self) -> str:
        """One of NAMES."""
        ...

    @property
    def one_sided(self) -> bool:
        """Decode reads the pool on its own: KvReady carries block ids and generations."""
        ...

    async def offer(self, pairing: Pairing) -> kv_pb2.KvSource:
        """What the reader at the other end of the pairing has to know. Raises NoTransportError with the reason when the two cannot share this transport."""
        ...

    def withdraw(self, pairing_id: str) -> None:
        """The pairing has ended: whatever its offer made is given back. Idempotent, no await."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Blocks of a memory of decode's that take a run, one for each of its blocks. They have the size of prefill's blocks."""

    memory: BlockMemory
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Probe:
    """The probe's bytes as they arrived, and the seconds that moving them took."""

    content: bytes | memoryview
    elapsed_s: float


@runtime_checkable
class PreparedReader(Protocol):
    """A reader that needs time before it can greet."""

    async def prepare(self) -> None:
        """Before `greet`. Raises NoTransportError when the reader cannot be used after all."""
        ...


@runtime_checkable
class PerishableReader(Protocol):
    """A reader that can go bad under a pairing that is intact otherwise."""

    @property
    def lost(self) -> str:
        """Why nothing can be read any more until the pairing is made anew; empty as long as it can."""
        ...


class KvReader(Protocol):
    """Decode's side of one transport, for one pairing: greet, attach, probe, then read as often as needed; `close` in any case."""

    @property
    def name(self) -> str:
        """One of NAMES."""
        ...

    @property
    def max_segment_bytes(self) -> int:
        """Most bytes that one `read` is asked for (one block at least)."""
        ...

    def greet(self, start: prefill_pb2.PairStart) -> None:
        """Adds what prefill has to know of this reader, before the pairing starts."""
        ...

    async def attach(self, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource) -> None:
        """Reaches the pool that is offered. Raises NoTransportError with the reason, TransferError."""
        ...

    async def probe(self) -> Probe:
        """Moves the probe's bytes once. Raises TransferError."""
        ...

    async def read(self, ready: kv_pb2.KvReady, to: Rows) -> None:
        """Copies the run `ready` into `to`.

        When it returns or raises, cancelled or not, it can touch neither memory any more. Raises HandoverError.
        """
        ...

    def close(self) -> None:
        """Takes no new read; what is attached goes when the last one has ended. Idempotent, no await."""
        ...
