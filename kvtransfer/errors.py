"""Errors of a hand-over, as a tree. Each of them means: the copy is thrown away.

HandoverError
├── HandoverProtocolError  a peer said what the protocol does not allow: a run out of order, twice, too long, a foreign hold
├── NoTransportError       the two ends share no transport
├── HoldUnknownError       no such hold for this peer, now (it does not say which)
└── TransferError          bytes did not arrive as they left
    ├── ChunkError         a chunk out of order, truncated or too long
    ├── DigestError        a block whose bytes are not those that left, or one that came without the digest that was asked for
    ├── StaleBlockError    a block whose generation is not the announced one: it holds, or may hold, something else
    ├── SourceGoneError    the peer, its pool or its hold went away while it was read
    └── StalledError       fewer bytes than the limit asks for arrived in its time
"""

from __future__ import annotations


class HandoverError(Exception):
    """Any reason to throw a copy away."""


class HandoverProtocolError(HandoverError):
    """A peer said what the protocol does not allow."""


class NoTransportError(HandoverError):
    """The two ends share no transport."""


class HoldUnknownError(HandoverError):
    """There is no such hold for this peer."""


class TransferError(HandoverError):
    """Bytes did not arrive as they left."""


class ChunkError(TransferError):
    """A chunk that is not the one that had to come."""


class DigestError(TransferError):
    """A block's digest is wrong or missing."""


class StaleBlockError(TransferError):
    """A block was given to another use."""


class SourceGoneError(TransferError):
    """What was read went away."""


class StalledError(TransferError):
    """Too few bytes in too long a time."""
