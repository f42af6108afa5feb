"""What tokens cost, from the price of a device's hour."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MILLION, _HOUR_S = 1e6, 3600.0


@dataclass(frozen=True, slots=True)
class Price:
    """All devices of the deployment are paid for all of the time, idle ones too."""

    per_device_hour: float
    num_devices: int = 1
    currency: str = "USD"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_device_hour) and self.per_device_hour >= 0):
            raise ValueError(f"per_device_hour is a price and must be 0 or more, got {self.per_device_hour}")
        if self.num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {self.num_devices}")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a million tokens, at the run's own rate of tokens. Infinite where none came."""

    price: Price
    per_million_output: float
    per_million_total: float
    """Prompt and output tokens together."""


def cost(price: Price, prompt_tokens_per_s: float, output_tokens_per_s: float) -> Cost:
    per_s = price.per_device_hour * price.num_devices / _HOUR_S

    def per_million(tokens_per_s: float) -> float:
        return per_s / tokens_per_s * _MILLION if tokens_per_s > 0 else math.inf

    return Cost(price, per_million(output_tokens_per_s), per_million(prompt_tokens_per_s + output_tokens_per_s))
