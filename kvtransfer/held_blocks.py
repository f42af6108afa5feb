"""What one-sided readers are told of each block, its place in prefill's pool and its generation, and what of it cannot be true."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import HandoverProtocolError

Ids = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint32]


def held_blocks(block_ids: Sequence[int], generations: Sequence[int], *, num_blocks: int, num_rows: int) -> tuple[Ids, Generations]:
    """Both as arrays, one of each for each of `num_rows` blocks of a pool of `num_blocks`; the numbers are uint32 as KvReady has them.

    Raises HandoverProtocolError for what cannot be a run of held blocks.
    """
    ids, numbers = np.array(block_ids, np.int64), np.array(generations, np.int64)
    if not 0 < num_rows == len(ids) == len(numbers):
        raise HandoverProtocolError(f"{len(ids)} ids and {len(numbers)} generations came for {num_rows} blocks")
    if not 0 <= ids.min() <= ids.max() < num_blocks:
        raise HandoverProtocolError(f"a block is none of the pool's {num_blocks}")
    if not (numbers % 2 == 1).all():
        raise HandoverProtocolError("a generation is not that of a held block")
    return ids, numbers.astype(np.uint32)
