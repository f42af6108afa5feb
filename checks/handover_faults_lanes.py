"""The ways between the two pools that faults are injected into."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from checks.handover_faults_kinds import IN_STREAM, IN_TRANSIT, STALE, Kind


@dataclass(frozen=True, slots=True)
class Lane:
    """A transport, as all workers of a cluster are told to use it."""

    name: str
    transport: str
    options: tuple[str, ...] = ()
    one_sided: bool = False
    """Decode reads prefill's memory on its own."""
    digests: bool = False
    """It carries digests whether decode asks for them or not."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What can go wrong on it."""
        return tuple(kind for kind in Kind if not (kind in IN_STREAM and self.transport != "inline") and not (kind in STALE and not self.one_sided))

    @property
    def kinds_for_digests(self) -> tuple[Kind, ...]:
        """What is found on it by `--kv-checksum` alone."""
        return () if self.digests else tuple(kind for kind in self.kinds if kind in IN_TRANSIT)


_NIXL = ("--nixl-net-devices=lo",)
INLINE = Lane("inline", "inline")
SHARED_MEMORY = Lane("shared_memory", "shared_memory", one_sided=True)
NIXL_READ = Lane("nixl read", "nixl", (*_NIXL, "--nixl-direction=read"), one_sided=True)
NIXL_WRITE = Lane("nixl write", "nixl", (*_NIXL, "--nixl-tls=tcp", "--nixl-direction=write"), digests=True)


def lanes() -> tuple[Lane, ...]:
    """Those that this machine has: nixl where it is installed."""
    return (INLINE, SHARED_MEMORY, *((NIXL_READ, NIXL_WRITE) if find_spec("nixl_cu13") else ()))
