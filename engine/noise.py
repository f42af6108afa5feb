"""Sampling noise by counter: an integer hash of (seed, sample index, position, token id), the same on every device.

The hash is part of the contract between pools, and of every recorded seed: `tests/engine/test_sampler.py` holds known values.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True, slots=True)
class RowKey:
    """Two 32-bit keys of one row's noise."""

    mask: int
    offset: int


def row_key(seed: int, sample_index: int, position: int) -> RowKey:
    """Mixes what a row's noise depends on, 64 bits each (splitmix64's finalizer, one round for each)."""
    state = _mix64(seed + _GOLDEN64)
    for word in (sample_index, position):
        state = _mix64(state + _GOLDEN64 + word)
    return RowKey(state >> 32, state & _MASK32)


def noise_bits(key: RowKey, token_id: int) -> int:
    """32 uniform bits of one token, as a signed number: mix32((mix32(token id) xor mask) + offset)."""
    return _signed(_mix32(((_mix32(token_id) ^ key.mask) + key.offset) & _MASK32))


def gumbel(key: RowKey, token_id: int) -> float:
    """One token's Gumbel noise from u = (bits + 2^31 + 1/2) / 2^32, never 0 and never 1; float64."""
    uniform = (noise_bits(key, token_id) + 2147483648.5) * 2.0**-32
    return -math.log(-math.log1p(-uniform))


def gumbel_approximately(key: RowKey, token_ids: torch.Tensor | None, vocab_size: int, device: torch.device) -> torch.Tensor:
    """The same noise, float32, for `token_ids` or the whole vocabulary; a device's logarithms may differ from `gumbel` in the last digits."""
    mixed = _mixed_token_ids(vocab_size, device)
    bits = (mixed if token_ids is None else mixed[token_ids]) ^ _signed(key.mask)
    _mix32_in_place(bits.add_(_signed(key.offset)))
    # The first logarithm in float64: near 1 a float32 cannot tell how far from 1 it is, and that distance is the noise.
    uniform = bits.double().add_(2147483648.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().float().log_().neg_()


@functools.lru_cache(maxsize=8)
def _mixed_token_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    return _mix32_in_place(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _mix64(x: int) -> int:
    x &= _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _mix32(x: int) -> int:
    """Chris Wellons' lowbias32, a bijection."""
    x = (x ^ (x >> 16)) * _FIRST & _MASK32
    x = (x ^ (x >> 15)) * _SECOND & _MASK32
    return x ^ (x >> 16)


def _mix32_in_place(x: torch.Tensor) -> torch.Tensor:
    """`_mix32` on int32; a signed shift fills with the sign, so its upper bits are masked off."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(_FIRST)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(_SECOND)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x
