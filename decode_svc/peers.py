"""The prefill instances that a decode worker may call, by name. An address never comes from a client or a peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from decode_svc.paired import PathEvent
from decode_svc.pairing import PeerPairing
from decode_svc.pairing_attempt import PairingParts
from engine.kv_cache import HostKvCache, KvLayout
from kvtransfer.budget import ByteBudget
from kvtransfer.memories import BlockMemory, HostBlocks
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.path import PathParts
from kvtransfer.readers import ReaderParts, make_readers
from kvtransfer.transport import NAMES
from rpc.channels import control_channel, data_channel
from tandem.v1 import kv_pb2, prefill_pb2_grpc

MIN_BYTES_PER_S = 50_000_000
MAX_BYTES_IN_FLIGHT = 64 << 20
MAX_TOTAL_BYTES_IN_FLIGHT = 256 << 20


@dataclass(frozen=True, slots=True)
class KvSettings:
    """How KV gets here."""

    transports: Sequence[str] = NAMES
    """By preference."""
    checksum: bool = False
    """Ask for a digest of every block, and refuse blocks without one."""
    min_bytes_per_s: float = MIN_BYTES_PER_S
    """A transport whose probe is slower is taken only when no other one is faster."""
    max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT
    """Per prefill instance."""
    max_total_bytes_in_flight: int = MAX_TOTAL_BYTES_IN_FLIGHT
    socket_dir: Path | None = None
    nixl: NixlSettings = field(default_factory=NixlSettings)


class KvParts:
    """What the paths from all instances share."""

    def __init__(self, pool: BlockMemory, layout: KvLayout, executor: Executor, settings: KvSettings) -> None:
        self.pool = pool
        self.layout = layout
        self.executor = executor
        self.settings = settings
        self.total = ByteBudget(settings.max_total_bytes_in_flight)

    @classmethod
    def of(cls, kv_cache: HostKvCache, executor: Executor, settings: KvSettings) -> KvParts:
        """Those of a pool in host memory."""
        return cls(HostBlocks(kv_cache.blocks), kv_cache.layout, executor, settings)


class PrefillPeer:
    """One instance: a channel for holds and the pairing, another for KV bytes."""

    def __init__(self, name: str, target: str, parts: KvParts, on_event: Callable[[PathEvent], None]) -> None:
        self.name = name
        self.target = target
        self._control = control_channel(target)
        self._data = data_channel(target)
        self.stub = prefill_pb2_grpc.PrefillServiceStub(self._control)
        settings = parts.settings
        reading = ReaderParts(parts.pool, parts.executor, self._control, self._data, settings.socket_dir, settings.nixl)
        path = PathParts(parts.pool, parts.layout, parts.executor, (ByteBudget(settings.max_bytes_in_flight), parts.total), settings.checksum)
        self.pairing = PeerPairing(
            PairingParts(name, self._control, path, lambda names: make_readers(names, reading), tuple(settings.transports), settings.min_bytes_per_s), on_event
        )

    async def close(self) -> None:
        """Ends all calls."""
        await self.pairing.close()
        await self._control.close(None)
        await self._data.close(None)


class PrefillPeers:
    """All instances."""

    def __init__(self, targets: Mapping[str, str], parts: KvParts, on_event: Callable[[PathEvent], None]) -> None:
        self._peers = {name: PrefillPeer(name, target, parts, on_event) for name, target in targets.items()}
        self._turns = itertools.count()

    def start(self) -> None:
        """Begins to pair with each. The loop must be running; `close` ends it."""
        for peer in self._peers.values():
            peer.pairing.start()

    def kv_paths(self) -> list[kv_pb2.KvPath]:
        """How KV gets here from each."""
        return [peer.pairing.report() for peer in self._peers.values()]

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def candidates(self, first: str, max_attempts: int) -> list[PrefillPeer]:
        """The instance asked for, if one is, then others in turn, paired ones in front, at most `max_attempts`."""
        others = [peer for name, peer in self._peers.items() if name != first]
        turn = next(self._turns) % len(others) if others else 0
        others = sorted([*others[turn:], *others[:turn]], key=lambda peer: not peer.pairing.is_paired)
        return [*([self._peers[first]] if first else []), *others][:max_attempts]

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
