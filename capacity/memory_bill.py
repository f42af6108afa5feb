"""What a worker's memory is spent on, and how many KV blocks that leaves."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_UTILIZATION = 0.9


class MemoryShortageError(Exception):
    """What is asked for does not fit. `setting` is the one to change first; the text carries the arithmetic."""

    def __init__(self, setting: str, description: str) -> None:
        super().__init__(description)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that there is, and what comes off it before KV does. All in bytes."""

    available_bytes: int
    """What the process found free at its start."""
    utilization: float
    """The share of it that the process may take, above 0 to 1."""
    weight_bytes: int
    activation_bytes: int
    """Peak of the largest step, beside weights and KV."""
    reserve_bytes: int
    """For what is no tensor: messages, tokens, the allocator's slack."""

    @property
    def limit_bytes(self) -> int:
        """What the process may take."""
        return int(self.available_bytes * self.utilization)

    @property
    def left_bytes(self) -> int:
        """What is left for KV; negative when the rest alone does not fit."""
        return self.limit_bytes - self.weight_bytes - self.activation_bytes - self.reserve_bytes

    def __str__(self) -> str:
        limit = f"{self.utilization:g} x {format_bytes(self.available_bytes)} = {format_bytes(self.limit_bytes)}"
        parts = f"weights {format_bytes(self.weight_bytes)}, activations {format_bytes(self.activation_bytes)}, reserve {format_bytes(self.reserve_bytes)}"
        return f"{limit} less {parts}"


@dataclass(frozen=True, slots=True)
class PoolWish:
    """How large the KV pool shall be. `num_blocks` goes before `kv_cache_bytes`; with neither the pool takes all that is left, or `modest_bytes`."""

    block_bytes: int
    block_size: int
    """Tokens of a block."""
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    modest_bytes: int | None = None
    """Bound of a pool that nobody sized; a sequence of `min_tokens` fits all the same. None: no bound."""
    min_tokens: int = 1
    """Tokens of the longest sequence that must fit a pool that nobody sized."""


@dataclass(frozen=True, slots=True)
class MemoryBill:
    """What the process will take, part by part."""

    budget: MemoryBudget
    block_bytes: int
    block_size: int
    num_blocks: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def total_bytes(self) -> int:
        """All parts; at most `budget.limit_bytes`."""
        return self.budget.weight_bytes + self.budget.activation_bytes + self.budget.reserve_bytes + self.kv_bytes

    def lines(self) -> list[str]:
        """A small table, one part a line."""
        budget = self.budget
        limit = f"limit {format_bytes(budget.limit_bytes)} = {budget.utilization:g} x {format_bytes(budget.available_bytes)} available"
        rows = (
            ("weights", budget.weight_bytes, ""),
            ("activations", budget.activation_bytes, "peak of the largest step"),
            ("reserve", budget.reserve_bytes, "messages, tokens, slack"),
            ("KV pool", self.kv_bytes, f"{self.num_blocks} blocks x {format_bytes(self.block_bytes)}, {self.num_tokens} tokens"),
            ("total", self.total_bytes, limit),
        )
        return [f"{name:<11} {format_bytes(size):>10}  {note}".rstrip() for name, size, note in rows]


def bill_of(budget: MemoryBudget, wish: PoolWish) -> MemoryBill:
    """Decides the number of blocks. Raises MemoryShortageError with the arithmetic when the wish does not fit the budget or is no block."""
    num_left = max(0, budget.left_bytes) // wish.block_bytes
    if wish.num_blocks is not None:
        num_blocks, setting = wish.num_blocks, "num_blocks"
    elif wish.kv_cache_bytes is not None:
        num_blocks, setting = wish.kv_cache_bytes // wish.block_bytes, "kv_cache_memory"
        if num_blocks < 1:
            raise MemoryShortageError(setting, f"{format_bytes(wish.kv_cache_bytes)} hold no block of {format_bytes(wish.block_bytes)}")
    else:
        num_blocks, setting = _unsized(budget, wish, num_left), "gpu_memory_utilization"
    if num_blocks > num_left:
        raise MemoryShortageError(
            setting,
            f"a KV pool of {num_blocks} blocks x {format_bytes(wish.block_bytes)} = {format_bytes(num_blocks * wish.block_bytes)} does not fit:"
            f" {budget} leaves {num_left} blocks{_advice(budget, num_left)}",
        )
    return MemoryBill(budget, wish.block_bytes, wish.block_size, num_blocks)


def _unsized(budget: MemoryBudget, wish: PoolWish, num_left: int) -> int:
    num_needed = -(-wish.min_tokens // wish.block_size)
    if 1 <= num_left < num_needed:
        raise MemoryShortageError(
            "max_model_len",
            f"{wish.min_tokens} tokens need {num_needed} blocks x {format_bytes(wish.block_bytes)} = {format_bytes(num_needed * wish.block_bytes)}:"
            f" {budget} leaves {num_left} blocks, {num_left * wish.block_size} tokens",
        )
    bound = num_left if wish.modest_bytes is None else min(num_left, wish.modest_bytes // wish.block_bytes)
    return max(bound, num_needed)


def _advice(budget: MemoryBudget, num_left: int) -> str:
    if num_left >= 1:
        return ""
    most = "activations, which max_num_batched_tokens bounds" if budget.activation_bytes > budget.weight_bytes else "weights"
    return f"; the largest part is {most}"


def format_bytes(num_bytes: int) -> str:
    """In binary units, such as 1.25 GiB."""
    size, units = float(num_bytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(size) >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{num_bytes} B" if unit == "B" else f"{size:.{2 if size < 10 else 1}f} {unit}"
