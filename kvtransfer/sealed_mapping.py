"""Another process's sealed memory, mapped for reading and counted by its readers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from engine.kv_cache import SEALS
from kvtransfer.copying import run_to_its_end
from kvtransfer.errors import NoTransportError, SourceGoneError

_log = logging.getLogger(__name__)

_MADV_POPULATE_READ = 22  # Linux 5.14
_AT_ONCE_BYTES = 16 << 20
"""What the kernel is asked for in one call: no other thread of the process can map or unmap memory meanwhile."""
_MAX_POPULATE_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SealedMapping:
    """A memfd of this size that nobody can cut, mapped read-only. Lives on the event loop; within `reading` any thread may look at `view`.

    What the kernel does in proportion to the size (page tables, the pages themselves when this is the last who has them: 0.1 to 0.2 s per GiB) is done in
    threads and without the GIL, which mmap's own methods keep, and holds up no copy: the executor maps piece by piece, and a thread of its own unmaps.
    """

    def __init__(self, fd: int, num_bytes: int, executor: Executor) -> None:
        """`fd` stays the caller's. Raises NoTransportError for memory that is not sealed or of another size."""
        _require_sealed(fd, num_bytes)
        self.num_bytes = num_bytes
        self._executor = executor
        self._num_readers = 0
        self._closed = False
        self._fd = os.dup(fd)
        try:
            self._memory: mmap.mmap | None = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise

    async def populate(self, max_s: float = _MAX_POPULATE_S) -> None:
        """Maps every page, so that no copy has to, or as many as this time allows; a cancel stops it. Raises SourceGoneError."""
        give_up_at = time.monotonic() + max_s
        with self.reading():
            for start in range(0, self.num_bytes, _AT_ONCE_BYTES):
                error = await self._populate(start)
                if error == errno.EINVAL:
                    _log.warning("this kernel cannot map all of a pool at once: the first copies are slow")
                    return
                if error:
                    raise SourceGoneError(f"the pool cannot be mapped: {os.strerror(error)}")
                if time.monotonic() >= give_up_at and start + _AT_ONCE_BYTES < self.num_bytes:
                    _log.warning(
                        "%.0f %% of a pool are mapped after %g s: the first copies of the rest are slow",
                        100 * (start + _AT_ONCE_BYTES) / self.num_bytes,
                        max_s,
                    )
                    return

    async def _populate(self, start: int) -> int:
        """The errno of one piece, 0 when it is mapped."""
        errors: list[int] = []

        def populate(_: threading.Event) -> None:
            address, size = self.view(0, self.num_bytes).ctypes.data, min(_AT_ONCE_BYTES, self.num_bytes - start)
            errors.append(ctypes.get_errno() if _libc.madvise(address + start, size, _MADV_POPULATE_READ) else 0)

        await run_to_its_end(self._executor, populate, threading.Event())
        return errors[0]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps the memory mapped. Raises SourceGoneError once it is closed."""
        if self._closed:
            raise SourceGoneError("the pool is not mapped any more")
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            self._unmap_if_last()

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of it: for who is within `reading`, and not to be kept for longer."""
        assert self._memory is not None, "nobody looks at memory without being counted"
        return np.frombuffer(self._memory, np.uint8, num_bytes, offset)

    def close(self) -> None:
        """Takes no new reader; the memory is unmapped behind the last one. Idempotent, no await."""
        self._closed = True
        self._unmap_if_last()

    def _unmap_if_last(self) -> None:
        if not self._closed or self._num_readers or self._memory is None:
            return
        memory, self._memory = self._memory, None
        # Of a large pool whose process has died these are seconds, and no other peer's copies wait for them; nor does the end of this process.
        threading.Thread(target=_unmap, args=(memory, self._fd), name="kv-unmap", daemon=True).start()


def _unmap(memory: mmap.mmap, fd: int) -> None:
    """Page tables first and the last descriptor last: both without the GIL, and close has next to nothing to do."""
    num_bytes = len(memory)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    for start in range(0, num_bytes, _AT_ONCE_BYTES):
        _libc.madvise(address + start, min(_AT_ONCE_BYTES, num_bytes - start), mmap.MADV_DONTNEED)
    try:
        memory.close()
    except BufferError:
        _log.error("a view of a pool has outlived its reader: its %d bytes stay mapped until the view is gone", num_bytes)
    os.close(fd)


def _require_sealed(fd: int, num_bytes: int) -> None:
    try:
        seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
    except OSError as error:
        raise NoTransportError(f"the descriptor is not one of a memory that can be sealed: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise NoTransportError(f"the memory is not sealed: {seals:#x}, expected {SEALS:#x}")
    if size != num_bytes:
        raise NoTransportError(f"the memory has {size} bytes, expected {num_bytes}")
