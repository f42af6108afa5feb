"""Whether a server keeps up: whether the requests that are out become more and more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stability:
    stable: bool
    num_in_flight: float
    """Mean over the window."""
    growth_share: float
    """By the slope of what is in flight: requests that stay behind, of those that come."""
    lag_share: float
    """1 - ended / sent within the window."""
