"""Errors of the engine, as a tree.

EngineError
├── EngineDeadError       the engine thread has ended; every waiter gets it
├── CapacityError         not enough allocatable blocks, or no place for a sequence, now
├── SequenceTooLongError  the sequence can never fit (context length or whole pool)
├── HoldBrokenError       the sequence is gone or its blocks are not in the state that the call needs
└── SequenceError         an error of one sequence (non-finite logits)
    └── NoTokenLeftError  its sampling parameters forbid every token: whoever sent them is to change them
"""

from __future__ import annotations


class EngineError(Exception):
    """Any error of the engine."""


class EngineDeadError(EngineError):
    """The engine thread has ended or the engine is stopping; nothing submitted to it will be answered."""


class CapacityError(EngineError):
    """Not enough of a resource ('blocks' or 'sequences') at this moment."""

    def __init__(self, resource: str, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} {resource} needed, {num_free} free")
        self.resource = resource
        self.num_needed = num_needed
        self.num_free = num_free


class SequenceTooLongError(EngineError):
    """The sequence can never fit."""


class HoldBrokenError(EngineError):
    """The sequence is gone, or its blocks are not in the state that the call needs."""


class SequenceError(EngineError):
    """An error that belongs to one sequence and fails it alone."""


class NoTokenLeftError(SequenceError):
    """The sequence's sampling parameters, which its client chose, forbid every token at a position."""
