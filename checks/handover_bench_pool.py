"""A KV pool without an engine: a real ledger over a real cache, whose blocks hold what their number says and are handed out far from each other."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.block_pool import BlockPool
from engine.errors import EngineError
from engine.fingerprint import model_fingerprint
from engine.kv_cache import HostKvCache, KvLayout
from kvtransfer.nixl_settings import NixlSettings

LLAMA_8B = KvLayout("synthetic", "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
"""The KV of Llama 3.1 8B: 2 MiB to a block of 16 tokens."""


def argument_of(settings: KvLayout | NixlSettings) -> str:
    """Settings as one argument of a command."""
    return json.dumps(asdict(settings))


def layout_of(text: str) -> KvLayout:
    """The layout that `argument_of` wrote."""
    return KvLayout(**json.loads(text))


def nixl_of(text: str) -> NixlSettings:
    """The same for NIXL's settings."""
    return NixlSettings(**json.loads(text))


def model_layout(model: Path, dtype: str, block_size: int) -> KvLayout:
    """The layout of a model's pool, from its files alone: torch stays out."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return KvLayout(model_fingerprint(model), dtype, config["num_hidden_layers"], config["num_key_value_heads"], head_dim, block_size)


def block_content(block: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """What a filled block of this number holds, in whatever process."""
    return np.frombuffer(np.random.default_rng(block).bytes(block_bytes), np.uint8)


class SyntheticPool:
    """Blocks of a pool by owner. References are taken on the event loop: there is no engine thread. Implements kvtransfer's References."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.kv_cache = HostKvCache(layout, num_blocks)
        self.ledger = BlockPool(num_blocks, self.kv_cache.generations)
        self._scatter(num_blocks)

    def _scatter(self, num_blocks: int) -> None:
        """Gives all blocks back in an order of chance, which is the order in which they are handed out from now on."""
        for number in range(num_blocks):
            self.ledger.allocate(str(number), 1)
        owners = list(range(num_blocks))
        random.Random(num_blocks).shuffle(owners)
        for number in owners:
            self.ledger.release(str(number))

    def fill(self) -> Self:
        """Writes every block."""
        for number, block in enumerate(self.kv_cache.blocks):
            block[:] = block_content(number, len(block))
        return self

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks."""
        for block in blocks:
            self.kv_cache.blocks[block].fill(0)

    def allocate(self, owner: str, num_blocks: int) -> tuple[int, ...]:
        """Blocks of an owner's own. Raises CapacityError."""
        return tuple(self.ledger.allocate(owner, num_blocks))

    def release(self, owner: str) -> None:
        """Gives an owner's blocks back."""
        self.ledger.release(owner)

    async def acquire(self, reader_id: str, seq_id: str, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """See References."""
        blocks = self.ledger.blocks_of(seq_id)[first_block : first_block + num_blocks]
        if len(blocks) != num_blocks:
            raise EngineError(f"{seq_id} has no blocks {first_block}+{num_blocks}")
        self.ledger.acquire(f"reader:{reader_id}", blocks)
        return blocks

    def drop(self, reader_id: str) -> None:
        """See References."""
        self.ledger.release(f"reader:{reader_id}")

    def close(self) -> None:
        """Gives the memory's descriptor back. Idempotent."""
        self.kv_cache.close()
