"""What a kernel must move and compute at least, from its shapes: its time over this by the device's measured rates is how near the limit it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one launch."""

    num_bytes: int
    """Read from and written to device memory, each element once."""
    num_operations: int
    """Of floating point; a multiplication and its addition are two."""
