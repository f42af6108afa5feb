"""What a transport is: a source that says where blocks are, and a reader that copies them. Pull only: decode reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from kvtransfer.errors import NoTransportError
from tandem.v1 import kv_pb2


class References(Protocol):
    """An engine's own references for readers of its memory: from before a reader starts until it can touch the memory no more."""

    async def acquire(self, reader_id: str, seq_id: str, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """Takes references on a run of a live sequence's blocks, on the engine thread; returns their pool ids."""
        ...

    def drop(self, reader_id: str) -> None:
        """Posts the end of a reader: idempotent, in order behind its acquire."""
        ...


class KvSource(Protocol):
    """Prefill's side: says where the blocks of a held sequence are."""

    def reachable(self, process_id: str) -> bool:
        """A decode process with this id can read the source."""
        ...

    def describe(self) -> kv_pb2.KvSource:
        """What travels with each KvReady."""
        ...


class KvReader(Protocol):
    """Decode's side: copies ready blocks into reserved blocks."""

    async def read(self, ready: kv_pb2.KvReady, block_table: Sequence[int]) -> None:
        """Copies run `ready` into the pool blocks `block_table[ready.first_block:][:ready.num_blocks]`.

        When it returns or raises, cancelled or not, it can touch neither pool any more. Raises HandoverError.
        """
        ...


def choose_source(wanted: Iterable[str], process_id: str, sources: Mapping[str, KvSource]) -> tuple[str, KvSource]:
    """The first transport by decode's preference that prefill has and decode can reach. Raises NoTransportError."""
    wanted = tuple(wanted)
    for name in wanted:
        source = sources.get(name)
        if source is not None and source.reachable(process_id):
            return name, source
    raise NoTransportError(f"decode reads {', '.join(wanted)}; this instance offers {', '.join(sources)}, none of them within decode's reach")
