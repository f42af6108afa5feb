"""Memory as NIXL takes it: addresses and lengths as integers, never as the pickled lists of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Pieces: TypeAlias = npt.NDArray[np.uint64]
"""Runs of bytes as (address, bytes), [n, 2]."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that an agent registers, and nothing around it."""

    address: int
    num_bytes: int
    owner: object
    """Kept alive as long as the memory is registered."""

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Region:
        """A contiguous array's memory."""
        if not array.flags.c_contiguous:
            raise ValueError("the array is not contiguous")
        return cls(array.ctypes.data, array.nbytes, array)


@dataclass(frozen=True, slots=True)
class Row:
    """Elements of one size, one behind the other."""

    address: int
    element_bytes: int


def one_piece(address: int, num_bytes: int) -> Pieces:
    """A single run."""
    return np.array([[address, num_bytes]], np.uint64)


def matching(own: Row, own_ids: Sequence[int], remote: Row, remote_ids: Sequence[int]) -> tuple[Pieces, Pieces]:
    """Pieces of both sides that match one by one: elements that are neighbours on both become one piece. Both have elements of one size."""
    pairs = np.column_stack((np.asarray(own_ids, np.int64), np.asarray(remote_ids, np.int64)))
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(pairs, axis=0) != 1).any(axis=1))))
    lengths = np.diff(np.concatenate((starts, [len(pairs)]))).astype(np.uint64) * np.uint64(own.element_bytes)
    firsts = pairs[starts].astype(np.uint64)
    return (
        np.column_stack((firsts[:, 0] * np.uint64(own.element_bytes) + np.uint64(own.address), lengths)),
        np.column_stack((firsts[:, 1] * np.uint64(remote.element_bytes) + np.uint64(remote.address), lengths)),
    )
