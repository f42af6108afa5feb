"""The prefill instances that a decode worker may call, by name. An address never comes from a client or a peer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kvtransfer.budget import ByteBudget
from kvtransfer.memories import Blocks
from kvtransfer.inline import InlineLimits, InlineReader
from kvtransfer.memory import MemoryReader
from kvtransfer.transport import KvReader
from rpc.channels import control_channel, data_channel
from rpc.failpoints import failpoint
from tandem.v1 import kv_pb2, prefill_pb2_grpc
from telemetry.spans import KV_TRANSFER

TRANSPORTS = ("memory", "inline")
MAX_BYTES_IN_FLIGHT = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """How blocks are read."""

    transports: Sequence[str] = TRANSPORTS
    """By preference."""
    inline: InlineLimits = field(default_factory=InlineLimits)
    max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT
    """Per prefill instance."""


class PrefillPeer:
    """One instance: a channel for holds, another for KV bytes, and the readers of its blocks."""

    def __init__(self, name: str, target: str, blocks: Blocks, executor: Executor, settings: ReadSettings) -> None:
        self.name = name
        self.target = target
        self._control = control_channel(target)
        self._data = data_channel(target)
        self.stub = prefill_pb2_grpc.PrefillServiceStub(self._control)
        budget = ByteBudget(settings.max_bytes_in_flight)
        readers: dict[str, KvReader] = {
            "memory": MemoryReader(blocks, executor, budget),
            "inline": InlineReader(blocks, self._data, budget, settings.inline),
        }
        self.readers: Mapping[str, KvReader] = {name: _Delayed(readers[name]) for name in settings.transports}

    async def close(self) -> None:
        """Ends all calls."""
        await self._control.close(None)
        await self._data.close(None)


class _Delayed:
    """A reader behind the failpoint of its segment."""

    def __init__(self, reader: KvReader) -> None:
        self._reader = reader

    async def read(self, ready: kv_pb2.KvReady, block_table: Sequence[int]) -> None:
        """See KvReader."""
        await failpoint(KV_TRANSFER)
        await self._reader.read(ready, block_table)


class PrefillPeers:
    """All instances."""

    def __init__(self, targets: Mapping[str, str], blocks: Blocks, executor: Executor, settings: ReadSettings) -> None:
        self._peers = {name: PrefillPeer(name, target, blocks, executor, settings) for name, target in targets.items()}
        self._turns = itertools.count()

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def candidates(self, first: str, max_attempts: int) -> list[PrefillPeer]:
        """The instance asked for, if one is, then others in turn, at most `max_attempts`."""
        others = [peer for name, peer in self._peers.items() if name != first]
        turn = next(self._turns) % len(others) if others else 0
        return [*([self._peers[first]] if first else []), *others[turn:], *others[:turn]][:max_attempts]

    async def close(self) -> None:
        """Ends all calls."""
        for peer in self._peers.values():
            await peer.close()


def parse_targets(text: str) -> dict[str, str]:
    """`a=host:port,b=host:port` as a mapping. Raises ValueError that shows the faulty entry."""
    targets: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, target = (part.strip() for part in entry.partition("="))
        host, _, port = target.rpartition(":")
        if not name or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{entry!r}: expected <name>=<host>:<port>")
        if name in targets:
            raise ValueError(f"{entry!r}: {name} is named twice")
        targets[name] = target
    return targets
