"""Who holds how many blocks of which decode instance: a forecast when a request is admitted, decode's own figure once it has answered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


def num_charged_blocks(num_prompt_tokens: int, num_output_tokens: int, block_size: int, *, n: int = 1, num_hits: int = 0, num_revived: int = 0) -> int:
    """Blocks that leave the set of allocatable ones for a request: new ones, and hit ones that nobody held.

    num_output_tokens is what is reserved for each of `n` samples; num_hits are prompt blocks found in the prefix cache, num_revived those of them that
    had no holder.
    """
    prompt_blocks = -(-num_prompt_tokens // block_size)
    blocks = -(-(num_prompt_tokens + num_output_tokens) // block_size)
    copies = (n - 1) * (num_prompt_tokens % block_size > 0)
    return prompt_blocks - num_hits + copies + n * (blocks - prompt_blocks) + num_revived


@dataclass(slots=True)
class _Entry:
    instance: str
    tenant: str
    num_blocks: int
    reserved: bool = False
    """Decode has answered."""


@dataclass(slots=True)
class _Pool:
    num_blocks: int
    num_free: int
    """As last reported."""
    num_released: int = 0
    """Blocks of reservations that ended since that report."""
    refused: bool = False
    """Decode said no; until something is heard of it again it has no room."""


class Ledger:
    """Blocks per decode instance and tenant. Pure; every call is O(1)."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._entries: dict[str, _Entry] = {}
        self._used: Counter[str] = Counter()
        """Blocks of all entries, by instance."""
        self._unanswered: Counter[str] = Counter()
        """The part of them that decode has not answered for."""
        self._used_by: Counter[str] = Counter()

    def report(self, instance: str, *, num_blocks: int, num_free: int) -> None:
        """Takes an instance's own figures: all blocks of its pool, and those that can be allocated now."""
        self._pools[instance] = _Pool(num_blocks, num_free)

    def forget(self, instance: str) -> None:
        """The instance is gone; entries stay until their requests end."""
        self._pools.pop(instance, None)

    def room(self, instance: str) -> int:
        """Blocks that can be promised now: what neither the entries nor, by the instance's own word, anybody else holds."""
        pool = self._pools.get(instance)
        if pool is None or pool.refused:
            return 0
        return max(0, min(pool.num_blocks - self._used[instance], pool.num_free + pool.num_released - self._unanswered[instance]))

    def num_blocks(self, instance: str) -> int:
        """Blocks of the pool, 0 when unknown."""
        pool = self._pools.get(instance)
        return pool.num_blocks if pool is not None else 0

    def num_used(self, instance: str) -> int:
        """Blocks of an instance's entries."""
        return self._used[instance]

    def num_used_by(self, tenant: str) -> int:
        """Blocks of a tenant's entries, all instances."""
        return self._used_by[tenant]

    def open(self, key: str, instance: str, tenant: str, num_blocks: int) -> None:
        """Promises blocks by a forecast. Raises ValueError for more than there is room for, and for a key that is open."""
        if key in self._entries:
            raise ValueError(f"{key} is open already")
        if num_blocks > self.room(instance):
            raise ValueError(f"{num_blocks} blocks of {instance} promised, room for {self.room(instance)}")
        self._entries[key] = _Entry(instance, tenant, num_blocks)
        self._count(self._entries[key], num_blocks)

    def correct(self, key: str, num_blocks: int) -> None:
        """Replaces the forecast by decode's figure; a key that was closed meanwhile changes nothing."""
        entry = self._entries.get(key)
        if entry is not None:
            self._count(entry, -entry.num_blocks)
            entry.num_blocks, entry.reserved = num_blocks, True
            self._count(entry, num_blocks)

    def answered(self, key: str) -> None:
        """Decode works on it without a figure of its own: the forecast stands, and its reports count the blocks."""
        entry = self._entries.get(key)
        if entry is not None and not entry.reserved:
            self.correct(key, entry.num_blocks)

    def close(self, key: str) -> None:
        """Gives back; idempotent."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._count(entry, -entry.num_blocks)
        pool = self._pools.get(entry.instance)
        if entry.reserved and pool is not None:
            pool.num_released += entry.num_blocks
            pool.refused = False

    def refuse(self, instance: str) -> None:
        """Decode had no blocks: no room until a report, a release or `retry`."""
        if instance in self._pools:
            self._pools[instance].refused = True

    def retry(self, instance: str) -> None:
        """Ends a refusal."""
        if instance in self._pools:
            self._pools[instance].refused = False

    def assert_nothing_held(self) -> None:
        """Raises AssertionError that names the open entries."""
        assert not self._entries, f"open entries: {sorted(self._entries)}"

    def _count(self, entry: _Entry, num_blocks: int) -> None:
        self._used[entry.instance] += num_blocks
        self._used_by[entry.tenant] += num_blocks
        if not entry.reserved:
            self._unanswered[entry.instance] += num_blocks
