"""The readers of one pairing attempt, by the names of their transports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvtransfer.cuda_ipc import CudaIpcReader, mappings_of
from kvtransfer.errors import NoTransportError
from kvtransfer.inline import InlineReader
from kvtransfer.memories import BlockMemory, HostBlocks
from kvtransfer.memory import MemoryReader
from kvtransfer.nixl_reader import NixlReader
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.shared_memory import SharedMemoryReader
from kvtransfer.transport import NAMES, KvReader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """What the readers of one prefill instance's blocks are made of; all of it outlives them."""

    pool: BlockMemory
    """Decode's own pool, which they copy into."""
    executor: Executor
    """Runs their copies."""
    control: grpc.aio.Channel
    """Carries the pairing and WriteKv."""
    data: grpc.aio.Channel
    """Carries ReadKv and nothing else."""
    socket_dir: Path | None = None
    """Where the unix sockets of both pools are; None: transports that need one are left out."""
    nixl: NixlSettings = field(default_factory=NixlSettings)


@dataclass(frozen=True, slots=True)
class Readers:
    """New readers in the order of preference, and why each other transport cannot be used by this process."""

    usable: Sequence[KvReader]
    unusable: Mapping[str, str] = field(default_factory=dict)


def _shared_memory(parts: ReaderParts) -> KvReader:
    if parts.socket_dir is None:
        raise NoTransportError("there is no directory for unix sockets")
    if not isinstance(parts.pool, HostBlocks):
        raise NoTransportError("decode's pool is not in host memory")
    return SharedMemoryReader(parts.executor, parts.socket_dir)


def _cuda_ipc(parts: ReaderParts) -> KvReader:
    mappings = mappings_of(parts.pool, parts.executor)
    if parts.socket_dir is None:
        raise NoTransportError("there is no directory for unix sockets")
    return CudaIpcReader(parts.pool, mappings, parts.executor, parts.socket_dir)


def _nixl(parts: ReaderParts) -> KvReader:
    if not isinstance(parts.pool, HostBlocks):
        raise NoTransportError("decode's pool is not in host memory")
    return NixlReader(parts.pool, parts.executor, parts.control, parts.nixl)


# Each raises NoTransportError with the reason why this process cannot use the transport.
_MAKERS: Mapping[str, Callable[[ReaderParts], KvReader]] = {
    "memory": lambda parts: MemoryReader(parts.executor),
    "shared_memory": _shared_memory,
    "cuda_ipc": _cuda_ipc,
    "nixl": _nixl,
    "inline": lambda parts: InlineReader(parts.data),
}


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is no transport's, for one that comes twice, and for none at all."""
    seen: set[str] = set()
    for name in names:
        if name not in NAMES:
            raise ValueError(f"unknown transport {name!r}, expected some of {', '.join(NAMES)}")
        if name in seen:
            raise ValueError(f"transport {name!r} is named twice")
        seen.add(name)
    if not seen:
        raise ValueError(f"no transport is named, expected some of {', '.join(NAMES)}")


def make_readers(names: Iterable[str], parts: ReaderParts) -> Readers:
    """Readers for one pairing, which must be closed; `names` by preference, as of check_names."""
    usable: list[KvReader] = []
    unusable: dict[str, str] = {}
    for name in names:
        try:
            if name not in _MAKERS:
                raise NoTransportError("this build has no reader for it")
            usable.append(_MAKERS[name](parts))
        except NoTransportError as error:
            unusable[name] = str(error)
        except Exception as error:  # what a library does beyond its promises costs its own transport, not the others
            _log.exception("transport %s cannot be used", name)
            unusable[name] = f"{type(error).__name__}: {error}"
    return Readers(usable, unusable)
