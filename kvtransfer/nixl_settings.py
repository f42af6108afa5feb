"""How NIXL is used: over which network devices, by which transports of UCX, and in which direction."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvtransfer.errors import NoTransportError

Direction: TypeAlias = Literal["auto", "read", "write"]
_INFINIBAND = Path("/sys/class/infiniband")
_EMULATED = frozenset({"tcp", "self"})
"""UCX's transports without one-sided reads."""


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """Of one process. UCX reads its part from the environment, where a variable that is set already stays as it is."""

    net_devices: str = ""
    """UCX_NET_DEVICES: network interfaces and RDMA ports, such as `eth0` or `mlx5_0:1`; empty: NIXL is not used.

    UCX listens on them, without authentication and in the clear, and whoever gets through can write to this process's memory. `all` is every interface.
    """
    tls: str = ""
    """UCX_TLS: UCX's transports; empty: UCX chooses."""
    direction: Direction = "auto"
    """`read`: decode reads prefill's pool; `write`: prefill writes into a staging region of decode's; `auto`: the faster one, by a probe."""

    @property
    def lane(self) -> str:
        """What is known of the lane: UCX does not tell which of its transports a transfer took."""
        return f"{os.environ.get('UCX_TLS') or 'any transport of UCX'} on {os.environ.get('UCX_NET_DEVICES') or self.net_devices}"

    def can_read(self, *, same_host: bool) -> bool:
        """Whether there may be a lane with one-sided reads: RDMA, or the kernel's copy between two processes of a host."""
        tls = os.environ.get("UCX_TLS") or self.tls
        if tls and not tls.startswith("^") and set(tls.split(",")) <= _EMULATED:
            return False
        return same_host or (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()))


def load_nixl(settings: NixlSettings) -> Any:
    """NIXL's module. Sets UCX's environment first, which counts for the whole process. Raises NoTransportError with the reason when it cannot be used."""
    if not settings.net_devices and not os.environ.get("UCX_NET_DEVICES"):
        raise NoTransportError("nixl_net_devices is not set: UCX would listen on every interface")
    os.environ.setdefault("UCX_NET_DEVICES", settings.net_devices)
    if settings.tls:
        os.environ.setdefault("UCX_TLS", settings.tls)
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    # Where a lane has no one-sided reads UCX would emulate them in both processes, and one that dies in the middle of a read ends the other one with an
    # assertion. Without the emulation such a read fails at once, and what works is known to be one-sided.
    os.environ["UCX_PROTO_EMULATION_ENABLE"] = "n"
    raise_exceptions = logging.raiseExceptions
    try:
        return importlib.import_module("nixl_cu13._api")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in ("nixl_cu13", "nixl_cu13._api")
        raise NoTransportError("not installed (the extra nixl)" if missing else f"NIXL cannot be loaded: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions  # its logging turns this off for everybody
