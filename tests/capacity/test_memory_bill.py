"""A bill adds up, sizes the pool as it was asked to, and refuses with the arithmetic what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capacity.memory_bill import MemoryBudget, MemoryShortageError, PoolWish, bill_of, format_bytes

_KIB, _MIB = 1 << 10, 1 << 20
_BUDGET = MemoryBudget(available_bytes=1000 * _MIB, utilization=0.9, weight_bytes=300 * _MIB, activation_bytes=80 * _MIB, reserve_bytes=20 * _MIB)
"""Leaves 500 MiB."""
_WISH = PoolWish(block_bytes=512 * _KIB, block_size=16)
"""1000 blocks, 16000 tokens fit what is left."""


@pytest.mark.parametrize(
    ("changes", "num_blocks"),
    [
        ({"num_blocks": 1}, 1),
        ({"num_blocks": 1000}, 1000),
        ({"num_blocks": 10, "modest_bytes": _MIB, "min_tokens": 16_000}, 10),
        ({"kv_cache_bytes": 10 * _MIB}, 20),
        ({"kv_cache_bytes": 10 * _MIB - 1}, 19),
        ({"kv_cache_bytes": 500 * _MIB}, 1000),
        ({}, 1000),
        ({"modest_bytes": 100 * _MIB}, 200),
        ({"modest_bytes": 100 * _MIB, "min_tokens": 3201}, 201),
        ({"modest_bytes": 900 * _MIB}, 1000),
        ({"modest_bytes": 1}, 1),
        ({"min_tokens": 16_000}, 1000),
    ],
)
def test_the_pool_is_as_large_as_it_was_asked_to_be(changes: dict[str, int], num_blocks: int) -> None:
    bill = bill_of(_BUDGET, replace(_WISH, **changes))
    assert bill.num_blocks == num_blocks
    assert bill.total_bytes == 400 * _MIB + num_blocks * 512 * _KIB <= _BUDGET.limit_bytes


_LIMIT = r"0\.9 x 1000\.0 MiB = 900\.0 MiB less weights 300\.0 MiB, activations 80\.0 MiB, reserve 20\.0 MiB"


@pytest.mark.parametrize(
    ("changes", "setting", "text"),
    [
        ({"num_blocks": 1001}, "num_blocks", rf"1001 blocks x 512\.0 KiB = 500\.5 MiB does not fit: {_LIMIT} leaves 1000 blocks$"),
        ({"kv_cache_bytes": 501 * _MIB}, "kv_cache_memory", rf"1002 blocks x 512\.0 KiB = 501\.0 MiB does not fit: {_LIMIT} leaves 1000 blocks$"),
        ({"kv_cache_bytes": 1000}, "kv_cache_memory", r"1000 B hold no block of 512\.0 KiB$"),
        ({"min_tokens": 16_001}, "max_model_len", rf"16001 tokens need 1001 blocks x 512\.0 KiB = 500\.5 MiB: {_LIMIT} leaves 1000 blocks, 16000 tokens$"),
        ({"min_tokens": 16_001, "modest_bytes": _MIB}, "max_model_len", r"leaves 1000 blocks, 16000 tokens$"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_arithmetic(changes: dict[str, int], setting: str, text: str) -> None:
    with pytest.raises(MemoryShortageError, match=text) as raised:
        bill_of(_BUDGET, replace(_WISH, **changes))
    assert raised.value.setting == setting


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight_bytes": 900 * _MIB}, "leaves 0 blocks; the largest part is weights$"),
        ({"activation_bytes": 2000 * _MIB}, "leaves 0 blocks; the largest part is activations, which max_num_batched_tokens bounds$"),
    ],
)
def test_a_model_that_leaves_no_block_is_refused_by_the_share_of_memory(changes: dict[str, int], text: str) -> None:
    with pytest.raises(MemoryShortageError, match=text) as raised:
        bill_of(replace(_BUDGET, **changes), _WISH)
    assert raised.value.setting == "gpu_memory_utilization"


def test_the_bill_names_every_part_on_a_line_and_adds_up() -> None:
    assert bill_of(_BUDGET, replace(_WISH, num_blocks=100)).lines() == [
        "weights      300.0 MiB",
        "activations   80.0 MiB  peak of the largest step",
        "reserve       20.0 MiB  messages, tokens, slack",
        "KV pool       50.0 MiB  100 blocks x 512.0 KiB, 1600 tokens",
        "total        450.0 MiB  limit 900.0 MiB = 0.9 x 1000.0 MiB available",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * _KIB, "1.50 MiB"), (100 << 30, "100.0 GiB"), (1 << 60, "1048576.0 TiB")]
)
def test_bytes_are_told_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
