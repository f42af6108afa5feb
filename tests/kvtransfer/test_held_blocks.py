"""A reader touches no block that it was not told of by place and generation."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.errors import HandoverProtocolError
from kvtransfer.held_blocks import held_blocks
from tandem.v1 import kv_pb2

_LAST = (1 << 32) - 1


def test_ids_and_generations_come_as_they_were_told() -> None:
    ready = kv_pb2.KvReady(block_ids=[7, 0, 7], generations=[_LAST, 1, 3])
    ids, generations = held_blocks(ready.block_ids, ready.generations, num_blocks=8, num_rows=3)
    assert ids.dtype == np.int64 and generations.dtype == np.uint32
    assert (ids.tolist(), generations.tolist()) == ([7, 0, 7], [_LAST, 1, 3])


@pytest.mark.parametrize(
    ("ids", "generations", "num_rows"),
    [
        ([8], [1], 1),
        ([_LAST], [1], 1),
        ([-1], [1], 1),
        ([0, 8], [1, 1], 2),
        ([0], [0], 1),
        ([0, 1], [1, 2], 2),
        ([0], [_LAST - 1], 1),
        ([0], [], 1),
        ([], [1], 1),
        ([0], [1], 2),
        ([0, 1], [1, 1], 1),
        ([], [], 0),
        ([], [], 1),
    ],
    ids=str,
)
def test_what_cannot_be_a_run_of_held_blocks_is_refused(ids: list[int], generations: list[int], num_rows: int) -> None:
    with pytest.raises(HandoverProtocolError):
        held_blocks(ids, generations, num_blocks=8, num_rows=num_rows)
