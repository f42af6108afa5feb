"""What a service does to its process before it serves."""

from __future__ import annotations

import ctypes
import gc
import platform
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory instead of giving it back page by page; False where the C library is another one.

    Each KV chunk is a fresh `bytes` of 1 MiB that glibc would map and unmap: page faults cost up to 60 % of the rate at which gRPC moves chunks.
    The price is that resident memory stays at its peak.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def freeze_heap() -> None:
    """Takes what was loaded at start out of the collector's sight, so that a full collection does not walk it in the middle of a stream."""
    gc.collect()
    gc.freeze()
