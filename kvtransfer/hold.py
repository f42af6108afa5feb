"""Holds of prefill's side: which blocks another pool may read, who may, and who is reading.

Each announced run has a reader's reference of its own. It is asked for when the run is announced, so that it is there (the engine thread may be busy
with the next chunk) when decode asks for the bytes, and given back when the hold is closed and the last reader of the run has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from kvtransfer.errors import HandoverProtocolError, HoldUnknownError, SourceGoneError
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import References


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer, such as 'ipv4:127.0.0.1' of 'ipv4:127.0.0.1:5000': a hold is bound to it."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class _Run:
    """Announced blocks [first_block, end_block) and the reference on them."""

    def __init__(self, references: References, quarantine: Quarantine, seq_id: str, first_block: int, num_blocks: int) -> None:
        self.first_block = first_block
        self.end_block = first_block + num_blocks
        self.reader_id = secrets.token_hex(8)
        self._references = references
        self._quarantine = quarantine
        self._acquiring = asyncio.ensure_future(references.acquire(self.reader_id, seq_id, first_block, num_blocks))
        self._stops: dict[int, Callable[[], None]] = {}
        self._keys = itertools.count()
        self._closed = False

    async def pool_ids(self) -> tuple[int, ...]:
        """Waits for the reference. Raises SourceGoneError when there is none to be had, or no more."""
        await asyncio.wait({self._acquiring})
        if self._closed or self._acquiring.cancelled():
            raise SourceGoneError("the hold is closed")
        if (error := self._acquiring.exception()) is not None:
            raise SourceGoneError("the held sequence is gone") from error
        return self._acquiring.result()

    def enter(self, stop: Callable[[], None]) -> int:
        """A reader begins."""
        key = next(self._keys)
        self._stops[key] = stop
        return key

    def leave(self, key: int) -> None:
        """A reader has ended."""
        del self._stops[key]
        self._drop_if_last()

    def close(self) -> None:
        """Tells readers to stop; the last one to end gives the reference back."""
        self._closed = True
        # A call not yet posted never is, and one that was is answered in front of the drop.
        self._acquiring.cancel()
        if self._stops:
            self._quarantine.enter(self.reader_id)
        for stop in list(self._stops.values()):
            stop()
        self._drop_if_last()

    def _drop_if_last(self) -> None:
        if self._closed and not self._stops:
            self._references.drop(self.reader_id)
            self._quarantine.leave(self.reader_id)


class Hold:
    """One prefill-only sequence's blocks from `first_block` on, readable as far as they were announced. Lives on the event loop."""

    def __init__(self, references: References, quarantine: Quarantine, seq_id: str, host: str, first_block: int, num_blocks: int) -> None:
        self.hold_id = secrets.token_hex(16)
        self.seq_id = seq_id
        self.host = host
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.num_announced_blocks = 0
        self._closed = False
        self._references = references
        self._quarantine = quarantine
        self._runs: list[_Run] = []
        self._unread: set[int] = set()

    @property
    def num_unread_blocks(self) -> int:
        """Announced blocks that nobody has read to the end."""
        return len(self._unread)

    def announce(self, num_filled_blocks: int) -> tuple[int, int]:
        """Makes the sequence's leading `num_filled_blocks` blocks readable; returns the new run (first block, blocks), maybe of none."""
        first = self.first_block + self.num_announced_blocks
        num_new = min(num_filled_blocks, self.first_block + self.num_blocks) - first
        if num_new <= 0:
            return first, 0
        self.num_announced_blocks += num_new
        self._runs.append(_Run(self._references, self._quarantine, self.seq_id, first, num_new))
        self._unread.update(range(first, first + num_new))
        return first, num_new

    @asynccontextmanager
    async def reading(self, first_block: int, num_blocks: int, stop: Callable[[], None]) -> AsyncIterator[tuple[int, ...]]:
        """Gives the pool ids of a run to a reader, which touches them only within the `with`; `stop` is called when the hold closes.

        A reader that leaves without an error has read the run. Raises HandoverProtocolError for blocks that are not within one announced run,
        SourceGoneError.
        """
        run = self._find(first_block, first_block + num_blocks)
        if self._closed:
            raise SourceGoneError("the hold is closed")
        key = run.enter(stop)
        try:
            pool_ids = await run.pool_ids()
            start = first_block - run.first_block
            yield pool_ids[start : start + num_blocks]
            self._unread.difference_update(range(first_block, first_block + num_blocks))
        finally:
            run.leave(key)

    def _find(self, first_block: int, end_block: int) -> _Run:
        for run in self._runs:
            if run.first_block <= first_block < end_block <= run.end_block:
                return run
        raise HandoverProtocolError(f"blocks {first_block} to {end_block} (exclusive) are not within an announced run")

    def close(self) -> None:
        """Forbids new readers and tells the present ones to stop. Idempotent, no await."""
        if not self._closed:
            self._closed = True
            for run in self._runs:
                run.close()


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

    def open(self, seq_id: str, host: str, first_block: int, num_blocks: int) -> Hold:
        """A new hold, which its owner must close."""
        hold = Hold(self._references, self._quarantine, seq_id, host, first_block, num_blocks)
        self._open[hold.hold_id] = hold
        return hold

    def close(self, hold: Hold) -> None:
        """Nobody finds the hold any more, and its readers are told to stop. Idempotent, no await."""
        self._open.pop(hold.hold_id, None)
        hold.close()

    def find(self, hold_id: str, host: str | None) -> Hold:
        """An open hold of the peer at `host`; None is a reader in this very process. Raises HoldUnknownError, the same for unknown and foreign."""
        hold = self._open.get(hold_id)
        if hold is None or host not in (None, hold.host):
            raise HoldUnknownError("no such hold")
        return hold
