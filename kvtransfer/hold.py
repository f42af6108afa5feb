"""Holds of prefill's side: which blocks another pool may read, who may, and who is reading."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtransfer.errors import HandoverProtocolError, HoldUnknownError, SourceGoneError
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import References

CONFIRMED = "tandem-confirmed"
"""Key of Prefill's trailing metadata whose value is the id of a hold that was unbroken until its RPC's end."""


class Hold:
    """One prefill-only sequence's blocks from `first_block` on, readable as far as they were announced. Lives on the event loop.

    `reader_id` is the sequence's own reader (SequenceSpec.reader_id): its references came with the blocks' allocation, and the hold gives them back when it is
    closed and the last one who reads under it has ended.
    """

    def __init__(self, references: References, quarantine: Quarantine, reader_id: str, pairing_id: str, first_block: int, num_blocks: int) -> None:
        self.hold_id = secrets.token_hex(16)
        self.reader_id = reader_id
        self.pairing_id = pairing_id
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.num_announced_blocks = 0
        self._pool_ids: tuple[int, ...] = ()
        self._closed = False
        self._references = references
        self._quarantine = quarantine
        self._stops: dict[int, Callable[[], None]] = {}
        self._keys = itertools.count()
        self._unread: set[int] = set()

    @property
    def pool_ids(self) -> tuple[int, ...]:
        """The sequence's blocks in the pool, from its first one on; none before they were allocated."""
        return self._pool_ids

    @property
    def num_unread_blocks(self) -> int:
        """Announced blocks that nobody has read to the end."""
        return len(self._unread)

    def allocated(self, pool_ids: tuple[int, ...]) -> None:
        """The sequence's blocks, and with them the reader's references, are there: before the first announcement."""
        self._pool_ids = pool_ids

    def announce(self, num_filled_blocks: int) -> tuple[int, int]:
        """Makes the sequence's leading `num_filled_blocks` blocks readable; returns the new run (first block, blocks), maybe of none."""
        first = self.first_block + self.num_announced_blocks
        num_new = min(num_filled_blocks, self.first_block + self.num_blocks) - first
        if num_new <= 0:
            return first, 0
        self.num_announced_blocks += num_new
        self._unread.update(range(first, first + num_new))
        return first, num_new

    @contextmanager
    def reading(self, first_block: int, num_blocks: int, stop: Callable[[], None]) -> Iterator[tuple[int, ...]]:
        """Gives the pool ids of announced blocks to one who touches them only within the `with`; `stop` is called when the hold closes.

        Whoever leaves without an error has read them. Raises HandoverProtocolError for blocks that were not announced, SourceGoneError.
        """
        end_block = first_block + num_blocks
        if not self.first_block <= first_block < end_block <= self.first_block + self.num_announced_blocks:
            raise HandoverProtocolError(f"blocks {first_block} to {end_block} (exclusive) were not announced")
        if self._closed:
            raise SourceGoneError("the hold is closed")
        key = next(self._keys)
        self._stops[key] = stop
        try:
            yield self._pool_ids[first_block:end_block]
            self._unread.difference_update(range(first_block, end_block))
        finally:
            del self._stops[key]
            self._drop_if_last()

    def close(self) -> None:
        """Forbids new readers and tells the present ones to stop; the last one to end gives the references back. Idempotent, no await."""
        if self._closed:
            return
        self._closed = True
        if self._stops:
            self._quarantine.enter(self.reader_id)
        for stop in list(self._stops.values()):
            stop()
        self._drop_if_last()

    def _drop_if_last(self) -> None:
        if self._closed and not self._stops:
            self._references.drop(self.reader_id)
            self._quarantine.leave(self.reader_id)


class Holds:
    """The open holds of one engine, by id. Lives on the event loop."""

    def __init__(self, references: References, quarantine: Quarantine) -> None:
        self._references = references
        self._quarantine = quarantine
        self._open: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Hold]:
        return iter(tuple(self._open.values()))

    def open(self, reader_id: str, pairing_id: str, first_block: int, num_blocks: int) -> Hold:
        """A new hold, which its owner must close."""
        hold = Hold(self._references, self._quarantine, reader_id, pairing_id, first_block, num_blocks)
        self._open[hold.hold_id] = hold
        return hold

    def close(self, hold: Hold) -> None:
        """Nobody finds the hold any more, and its readers are told to stop. Idempotent, no await."""
        self._open.pop(hold.hold_id, None)
        hold.close()

    def find(self, hold_id: str, pairing_id: str) -> Hold:
        """An open hold under this pairing. Raises HoldUnknownError, the same for unknown and foreign."""
        hold = self._open.get(hold_id)
        if hold is None or pairing_id != hold.pairing_id:
            raise HoldUnknownError("no such hold")
        return hold
