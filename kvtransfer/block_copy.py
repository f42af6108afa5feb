"""Copying blocks between two pools of host memory in one native call: without the GIL, past the caches, and stopped within a block."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.kernels.build import KernelBuildError, build_shared_library, default_cache_dir
from kvtransfer.memories import Blocks

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("block_copy.cpp")
Ids = npt.NDArray[np.int64]
_MAX_RUN_BLOCKS = 16
_LOADING = threading.Lock()
_FENCE = threading.Lock()


class CopyStop(threading.Event):
    """An event that native code sees too."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = ctypes.c_int32(0)

    def set(self) -> None:
        """As an event's."""
        self.flag.value = 1
        super().set()

    def clear(self) -> None:
        """As an event's."""
        self.flag.value = 0
        super().clear()


CopyBlocks = Callable[[Blocks, Sequence[int] | Ids, Blocks, Sequence[int] | Ids, CopyStop], bool]
"""As of copy_blocks."""


def copy_blocks(source: Blocks, source_ids: Sequence[int] | Ids, destination: Blocks, destination_ids: Sequence[int] | Ids, stop: CopyStop) -> bool:
    """Copies source_ids[i] to destination_ids[i], for all i; ends early and returns False once `stop` is set.

    Every load of the source is done when it returns, also for who looks at other memory of the source's owner next. Raises ValueError for ids outside their
    pool and for pools that do not fit each other, before a byte is touched.
    """
    from_ids, to_ids = _checked(source, source_ids, "source"), _checked(destination, destination_ids, "destination")
    if not source.shape[1] == destination.shape[1] > 0 or len(from_ids) != len(to_ids) or not destination.flags.writeable:
        raise ValueError(f"cannot copy {len(from_ids)} blocks of {source.shape[1]} bytes to {len(to_ids)} of {destination.shape[1]}")
    return _copy_here()(source, from_ids, destination, to_ids, stop)


def _checked(blocks: Blocks, ids: Sequence[int] | Ids, side: str) -> Ids:
    array = np.ascontiguousarray(ids, np.int64)  # native code takes no strides
    if not blocks.flags.c_contiguous or (array.size and not 0 <= array.min() <= array.max() < len(blocks)):
        raise ValueError(f"a {side} of {len(blocks)} blocks has no such ids")
    return array


_Copy = Callable[[Blocks, Ids, Blocks, Ids, CopyStop], bool]


def load_copy(cache_dir: Path | None = None, compiler: str = "c++") -> None:
    """Compiles the native copy, or finds it compiled, in front of its first use: seconds, so not on an event loop.

    Where that fails numpy copies, and a warning in the log says so.
    """
    _copy_here(cache_dir, compiler)


_loaded: list[_Copy] = []


def _copy_here(cache_dir: Path | None = None, compiler: str = "c++") -> _Copy:
    with _LOADING:
        if not _loaded:
            try:
                _loaded.append(build_native_copy(cache_dir or default_cache_dir(), compiler))
            except (KernelBuildError, OSError, AttributeError) as error:
                _log.warning("numpy copies blocks one by one, slower and with the GIL taken for each, since there is no native copy: %s", error)
                _loaded.append(numpy_copy)
        return _loaded[0]


def build_native_copy(cache_dir: Path, compiler: str) -> _Copy:
    """The native copy, from the cache or compiled. Raises KernelBuildError, OSError, and AttributeError for a library that is another one."""
    call = ctypes.CDLL(str(build_shared_library(SOURCE, cache_dir, compiler))).tandem_copy_blocks
    call.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    call.restype = ctypes.c_int64

    def copy(source: Blocks, source_ids: Ids, destination: Blocks, destination_ids: Ids, stop: CopyStop) -> bool:
        pointers = destination.ctypes.data, destination_ids.ctypes.data, source.ctypes.data, source_ids.ctypes.data
        return bool(call(*pointers, len(source_ids), source.shape[1], ctypes.addressof(stop.flag)) == len(source_ids))

    return copy


def numpy_copy(source: Blocks, source_ids: Ids, destination: Blocks, destination_ids: Ids, stop: CopyStop) -> bool:
    """The same without a compiler."""
    done = True
    for start, end in _runs(source_ids.tolist(), destination_ids.tolist()):
        if stop.is_set():
            done = False
            break
        first, to, count = int(source_ids[start]), int(destination_ids[start]), end - start
        np.copyto(destination[to : to + count], source[first : first + count])
    for _ in range(2):  # To give a lock back and take it again is a fence: no load from behind it is done in front.
        with _FENCE:
            pass
    return done


def _runs(source_ids: Sequence[int], destination_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Index ranges in which both sides are neighbours, at most _MAX_RUN_BLOCKS long so that a stop is seen soon."""
    start = 0
    for index in range(1, len(source_ids) + 1):
        apart = index == len(source_ids) or source_ids[index] != source_ids[index - 1] + 1 or destination_ids[index] != destination_ids[index - 1] + 1
        if apart or index - start == _MAX_RUN_BLOCKS:
            yield start, index
            start = index
