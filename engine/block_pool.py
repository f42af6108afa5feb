"""The ledger of a KV pool's blocks: who holds which, which are filled, which prefixes can be hit. No tensor, no I/O.

Every block is in exactly one of three sets: free (no content), cached (nobody holds it, its prefix can be hit) and held (at least one
owner by name). `free + cached + held = all` after every call.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import MutableSequence, Sequence

from engine.errors import CapacityError


class BlockPool:
    """References on blocks by owner name, and an index of filled prefixes. Touched by the engine thread only.

    `generations`, when given, is kept by the pool: of each block a 32-bit number that grows by one when the block gets its first holder and when it loses its
    last one, so that it is odd while the block is held, and who reads the memory on his own can see whether it still holds what he was told.
    """

    def __init__(self, num_blocks: int, generations: MutableSequence[int] | memoryview | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self._generations = generations if generations is not None else [0] * num_blocks
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._filled = [False] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._owners: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks with no content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds whose prefix can be hit."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_allocatable(self) -> int:
        """Blocks that an allocation could take now."""
        return len(self._free) + len(self._cached)

    def owners(self) -> dict[str, int]:
        """References per owner."""
        return {owner: len(blocks) for owner, blocks in self._owners.items()}

    def blocks_of(self, owner: str) -> tuple[int, ...]:
        """An owner's blocks, in the order in which they were taken."""
        return tuple(self._owners.get(owner, ()))

    def allocate(self, owner: str, num_blocks: int) -> list[int]:
        """Takes empty blocks, the least recently used cached prefixes last; all or none. Raises CapacityError."""
        if num_blocks > self.num_allocatable:
            raise CapacityError("blocks", num_blocks, self.num_allocatable)
        taken = [self._take_empty() for _ in range(num_blocks)]
        for block in taken:
            self._references[block] = 1
            self._next_generation(block)
        if taken:
            self._owners.setdefault(owner, []).extend(taken)
        return taken

    def _take_empty(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        """Takes the block's prefix out of the index; its content means nothing any more."""
        self.unname([block])
        self._filled[block] = False

    def acquire(self, owner: str, blocks: Sequence[int]) -> int:
        """Adds a reference to held or cached blocks; returns how many of them nobody held before."""
        num_woken = 0
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free: nothing can be acquired there")
                del self._cached[block]
                self._next_generation(block)
                num_woken += 1
            self._references[block] += 1
        if blocks:
            self._owners.setdefault(owner, []).extend(blocks)
        return num_woken

    def release(self, owner: str) -> None:
        """Drops all references of an owner; blocks nobody holds become cached when filled and named, else free. Idempotent."""
        # Deep blocks first: they end up older in the LRU order than their parents, so that a chain is evicted from its tail.
        for block in reversed(self._owners.pop(owner, [])):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._set_down(block)

    def transfer(self, owner: str, to: str) -> None:
        """Makes all references of an owner those of another, which may have some already. Nothing is given back meanwhile."""
        blocks = self._owners.pop(owner, None)
        if blocks:
            self._owners.setdefault(to, []).extend(blocks)

    def _next_generation(self, block: int) -> None:
        self._generations[block] = (self._generations[block] + 1) & 0xFFFFFFFF

    def _set_down(self, block: int) -> None:
        self._next_generation(block)
        name = self._hashes[block]
        if self._filled[block] and name is not None and self._index.get(name) == block:
            self._cached[block] = None
        else:
            self._forget(block)
            self._free.append(block)

    def mark_filled(self, block: int, name: bytes | None) -> None:
        """Says that the step or hand-over that wrote the block has completed. `name` is its prefix hash, None for a partial block."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is held by nobody and cannot be filled")
        self._filled[block] = True
        self._hashes[block] = name
        if name is not None:
            self._index.setdefault(name, block)

    def unname(self, blocks: Sequence[int]) -> None:
        """Takes held blocks out of the prefix index: whoever holds them goes on, nobody hits them any more."""
        for block in blocks:
            name = self._hashes[block]
            if name is not None and self._index.get(name) == block:
                del self._index[name]
            self._hashes[block] = None

    def is_filled(self, block: int) -> bool:
        """The block's content is complete and may be read."""
        return self._filled[block]

    def find_prefix(self, names: Sequence[bytes]) -> list[int]:
        """The filled blocks of the longest known prefix of a hash chain."""
        found: list[int] = []
        for name in names:
            block = self._index.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_held_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks somebody holds already."""
        return sum(self._references[block] > 0 for block in blocks)

    def check(self) -> None:
        """Verifies the ledger; an AssertionError here is a broken invariant and ends the process."""
        references = [0] * self.num_blocks
        for owner, blocks in self._owners.items():
            assert blocks, f"owner {owner} holds nothing"
            for block in blocks:
                references[block] += 1
        assert references == self._references, "references and owners differ"
        assert all(self._generations[block] % 2 == (count > 0) for block, count in enumerate(references)), "a generation is odd exactly while its block is held"
        held = {block for block, count in enumerate(references) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two sets"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is in no set"
        for name, block in self._index.items():
            assert block not in free and self._filled[block] and self._hashes[block] == name, f"the index names block {block}, which is not that prefix"
        assert all(self._hashes[block] in self._index for block in cached), "a cached block cannot be hit"
