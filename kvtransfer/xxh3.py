"""XXH3 (64 bits, seed 0) of long inputs in two halves: eight accumulators, which a GPU makes in eight threads per block, and the mixing of them at the end.

For who has the bytes in host memory xxhash is the faster way to the same number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MIN_BYTES = 241
"""Shorter inputs have another algorithm."""
NUM_ACCUMULATORS = 8
STRIPE_BYTES = 64
STRIPES_PER_ROUND = 16
"""Stripes between two scrambles."""
PRIME32_1 = 0x9E3779B1
_PRIME32_2, _PRIME32_3 = 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
START = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, PRIME32_1)
"""What the accumulators start from."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SECRET_WORDS = struct.unpack("<24Q", _SECRET)
"""The key, as words: a stripe's lane is mixed with word `stripe of its round + lane`, a scramble with word 16 + lane."""
LAST_WORDS = struct.unpack_from("<8Q", _SECRET, 121)
"""The words that the last stripe is mixed with."""
_MASK = (1 << 64) - 1


def accumulators(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """What the GPU's kernel makes, made with numpy: [num_blocks, 8] of [num_blocks, block_bytes]. Slow: for tests and checks."""
    num_blocks, block_bytes = blocks.shape
    if block_bytes < MIN_BYTES or block_bytes % 8:
        raise ValueError(f"a block must have at least {MIN_BYTES} bytes, and a multiple of 8, got {block_bytes}")
    secret, words = np.array(SECRET_WORDS, np.uint64), np.ascontiguousarray(blocks).view(np.uint64)
    result = np.tile(np.array(START, np.uint64), (num_blocks, 1))
    for stripe in range((block_bytes - 1) // STRIPE_BYTES):
        of_round = stripe % STRIPES_PER_ROUND
        _mix(result, words[:, 8 * stripe : 8 * stripe + 8], secret[of_round : of_round + 8])
        if of_round == STRIPES_PER_ROUND - 1:
            result[:] = (result ^ (result >> np.uint64(47)) ^ secret[16:24]) * np.uint64(PRIME32_1)
    _mix(result, words[:, -8:], np.array(LAST_WORDS, np.uint64))
    return result


def _mix(result: npt.NDArray[np.uint64], stripe: npt.NDArray[np.uint64], secret: npt.NDArray[np.uint64]) -> None:
    keyed = stripe ^ secret
    result += stripe[:, [1, 0, 3, 2, 5, 4, 7, 6]]
    result += (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))


def finish(of_block: Sequence[int], num_bytes: int) -> int:
    """The digest of a block of `num_bytes` from its eight accumulators."""
    total = num_bytes * _PRIME64_1
    for pair in range(4):
        low, high = struct.unpack_from("<2Q", _SECRET, 11 + 16 * pair)
        product = (of_block[2 * pair] ^ low) * (of_block[2 * pair + 1] ^ high)
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total = ((total ^ (total >> 37)) * 0x165667919E3779F9) & _MASK
    return total ^ (total >> 32)
