"""Settings of a prefill worker."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator

from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.transport import NAMES
from worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Tandem prefill worker: computes prompts' KV caches and holds them while decode workers copy."""

    kv_transports: str = ",".join(NAMES)
    """Transports by which KV may be read; those that this host cannot have are left out, and the log says why."""
    kv_socket_dir: Path | None = None
    """Directory of unix sockets, closed to other users and the same for all workers of a host; default: tandem in $XDG_RUNTIME_DIR or in /run, else
    tandem-<uid> in the temporary directory."""

    @field_validator("kv_transports")
    @classmethod
    def _check_transports(cls, value: str) -> str:
        for name in value.split(","):
            if name not in NAMES:
                raise ValueError(f"unknown transport {name!r}, expected some of {', '.join(NAMES)}")
        return value

    def nixl(self) -> NixlSettings:
        """How NIXL is used."""
        return NixlSettings(self.nixl_net_devices, self.nixl_tls, self.nixl_direction)
