"""Numbers as people read them: three digits that count, one unit for what is compared."""

from __future__ import annotations

import math

NONE = "–"
NEVER = "never"


def number(value: float, digits: int = 3) -> str:
    """So many digits that count, thousands set apart; NaN is a dash."""
    if math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, decimals)
    if decimals and abs(rounded) >= 10 ** (digits - decimals):
        decimals -= 1  # 9.996 became 10.00
    return f"{rounded:,.{decimals}f}".replace(",", "\u202f")


def count(value: int) -> str:
    return f"{value:,}".replace(",", "\u202f")


def share(value: float) -> str:
    """Percent, with a digit more where it is near 0 or 1."""
    if math.isnan(value):
        return NONE
    percent = value * 100
    near = min(percent, 100 - percent)
    return f"{percent:.2f} %" if 0 < near < 1 else f"{percent:.1f} %" if near else f"{percent:.0f} %"


def seconds(value: float) -> str:
    """With the unit that suits it."""
    if math.isnan(value):
        return NONE
    if math.isinf(value):
        return NEVER
    if abs(value) < 1e-3 and value != 0:
        return f"{number(value * 1e6)} µs"
    return f"{number(value * 1e3)} ms" if abs(value) < 1 else f"{number(value)} s"


def unit_for(largest_s: float) -> tuple[str, float]:
    """Name and factor of the unit in which a row of times is told."""
    return ("s", 1.0) if math.isfinite(largest_s) and largest_s >= 10 else ("ms", 1e3)


def tick(value: float) -> str:
    """At an axis."""
    return "0" if abs(value) < 1e-12 else f"{value:,.10g}".replace(",", "\u202f")


def seconds_tick(value: float) -> str:
    if abs(value) < 1e-12:
        return "0"
    if abs(value) < 0.9995e-3:
        return f"{value * 1e6:.4g} µs"
    return f"{value * 1e3:.4g} ms" if abs(value) < 0.9995 else f"{tick(float(f'{value:.6g}'))} s"


def percent_tick(value: float) -> str:
    return f"{value * 100:.6g} %"
