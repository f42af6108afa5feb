"""Errors of the engine, as a tree.

EngineError
├── EngineDeadError       the engine thread has ended; every waiter gets it
├── CapacityError         the pool has not enough allocatable blocks now
├── SequenceTooLongError  the sequence can never fit (context length or whole pool)
└── SequenceError         an error of one sequence (sampling, non-finite logits)
"""

from __future__ import annotations


class EngineError(Exception):
    """Any error of the engine."""


class EngineDeadError(EngineError):
    """The engine thread has ended or the engine is stopping; nothing submitted to it will be answered."""


class CapacityError(EngineError):
    """The pool has not enough allocatable blocks at this moment."""

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} blocks needed, {num_free} allocatable")
        self.num_needed = num_needed
        self.num_free = num_free


class SequenceTooLongError(EngineError):
    """The sequence can never fit."""


class SequenceError(EngineError):
    """An error that belongs to one sequence and fails it alone."""
