"""Other processes' CUDA pools as this process has them open: each one once, for as long as a pairing or a reader needs it."""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass

import numpy as np

from kvtransfer.cuda_kernels import VECTOR_BYTES
from kvtransfer.cuda_pool import CudaBlocks, CudaPool
from kvtransfer.cuda_runtime import HANDLE_BYTES, CudaError, CudaRuntime, Gather, Numbers, ids_of
from kvtransfer.errors import HandoverProtocolError, NoTransportError, SourceGoneError, StaleBlockError
from kvtransfer.held_blocks import held_blocks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolExport:
    """What moves over the unix socket and nowhere else. The handle opens the whole pool, for writing too."""

    handle: str
    process_id: str
    pool_id: str
    device_uuid: str
    num_bytes: int
    """Of the pool, from its first block to its probe's end."""
    offset: int
    """Of the first block in the allocation that the handle opens."""
    num_blocks: int
    block_bytes: int
    probe_offset: int
    """From the first block."""
    probe_bytes: int
    generations_offset: int
    """In the file whose descriptor comes along."""

    def __repr__(self) -> str:
        return f"PoolExport(pool_id={self.pool_id!r})"

    @classmethod
    def of(cls, pool: CudaPool) -> PoolExport:
        """Exports a pool. Raises CudaError."""
        return cls(
            handle=pool.export().hex(),
            process_id=pool.runtime.process_id,
            pool_id=pool.pool_id,
            device_uuid=pool.runtime.device_uuid,
            num_bytes=pool.num_bytes,
            offset=0,
            num_blocks=pool.memory.num_blocks,
            block_bytes=pool.memory.block_bytes,
            probe_offset=pool.probe_offset,
            probe_bytes=len(pool.probe),
            generations_offset=pool.generations.offset,
        )

    def pack(self) -> bytes:
        """As bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> PoolExport:
        """Raises HandoverProtocolError for what cannot be a pool."""
        try:
            export = cls(**json.loads(payload))
        except (TypeError, ValueError):
            raise HandoverProtocolError("prefill's socket gave no CUDA pool") from None
        texts = (export.handle, export.process_id, export.pool_id, export.device_uuid)
        moved = (export.offset, export.block_bytes, export.probe_offset, export.probe_bytes)
        sizes = (*moved, export.num_bytes, export.num_blocks, export.generations_offset)
        fits = all(isinstance(text, str) for text in texts) and all(type(size) is int and 0 <= size < 1 << 48 for size in sizes)
        fits = fits and not any(size % VECTOR_BYTES for size in moved) and export.block_bytes > 0 and export.probe_bytes > 0
        if not fits or export.num_blocks * export.block_bytes > export.probe_offset or export.probe_offset + export.probe_bytes != export.num_bytes:
            raise HandoverProtocolError("prefill's socket gave a CUDA pool whose parts do not fit")
        if len(export.handle) != 2 * HANDLE_BYTES or not set(export.handle) <= set("0123456789abcdef"):
            raise HandoverProtocolError("prefill's socket gave no handle")
        return export


class Mapping:
    """One pool of another process, open here. Its users are counted: pairings, and readers while they read."""

    def __init__(self, runtime: CudaRuntime, export: PoolExport, address: int, generations: Numbers) -> None:
        """Raises CudaError."""
        self.runtime = runtime
        self._stream = runtime.new_stream()  # its own, so that a peer behind a slow link holds up nobody else
        self.num_users = 1
        self.address = address
        """Of the allocation, 0 when it is closed."""
        self.blocks = CudaBlocks(runtime, address + export.offset, export.num_blocks, export.block_bytes)
        self._probe = CudaBlocks(runtime, self.blocks.address + export.probe_offset, 1, export.probe_bytes)
        self._generations = generations

    def gather(self, ids: Sequence[int], generations: Sequence[int], to: CudaBlocks, to_ids: Sequence[int], stop: threading.Event) -> None:
        """Copies blocks, and returns or raises when the device has ended; blocks a thread for as long. The generations must be these before and after.

        Raises HandoverProtocolError, StaleBlockError, SourceGoneError.
        """
        held, due = held_blocks(ids, generations, num_blocks=self.blocks.num_blocks, num_rows=len(to_ids))
        source_ids, destination_ids = ids_of(held), ids_of(to_ids)
        if to.block_bytes != self.blocks.block_bytes or (destination_ids >= to.num_blocks).any():
            raise HandoverProtocolError("prefill's pool has blocks of another size than it told of, or the destination has fewer")
        self._check(source_ids, due)
        if stop.is_set():
            raise SourceGoneError("the copy was stopped")
        self._run(Gather(self.blocks.address, source_ids, to.address, destination_ids, to.block_bytes))
        self._check(source_ids, due)

    def probe(self, landing: int) -> float:
        """Copies the probe's bytes to an address of this process's own; the seconds it took. As gather."""
        started = time.perf_counter()
        self._run(Gather(self._probe.address, ids_of([0]), landing, ids_of([0]), self._probe.block_bytes))
        return time.perf_counter() - started

    def close(self) -> None:
        """Unmaps it: nobody may use it then. Idempotent. Raises CudaError."""
        address, self.address = self.address, 0
        if address:
            self.runtime.close_stream(self._stream)
            self.runtime.ipc_close(address)

    def _check(self, ids: Numbers, generations: Numbers) -> None:
        stale = self._generations[ids] != generations
        if stale.any():
            raise StaleBlockError(f"{stale.sum()} of prefill's blocks were given to another use, the first is block {ids[stale.argmax()]} of its pool")

    def _run(self, gather: Gather) -> None:
        try:
            event = self.runtime.gather(self._stream, gather)
            try:
                wait_until_done(self.runtime, event)
            finally:
                self.runtime.close_event(event)
        except CudaError as error:
            raise SourceGoneError(f"copying on the GPU failed: {error}") from error


_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 500e-6


def wait_until_done(runtime: CudaRuntime, event: int) -> None:
    """Blocks this thread until the device is behind the event: nothing can stop a kernel, so nothing ends the wait sooner. Raises CudaError."""
    pause_s = _FIRST_POLL_S
    while not runtime.is_done(event):
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_POLL_S)


def map_generations(fd: int, export: PoolExport) -> Numbers:
    """The table behind a descriptor, read-only, [num_blocks]; lives without the descriptor. Raises HandoverProtocolError for a file that is none."""
    end = export.generations_offset + 4 * export.num_blocks
    # Cut under its readers, it would end this process.
    if os.fstat(fd).st_size < end or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise HandoverProtocolError("prefill's table of generations is too short, or can be cut")
    return np.frombuffer(mmap.mmap(fd, end, mmap.MAP_SHARED, mmap.PROT_READ), np.uint32, export.num_blocks, export.generations_offset)


class Mappings:
    """All pools that one process has open on one GPU. `open` and the closing run in threads; the rest from anywhere.

    CUDA counts how often a handle was opened in one process only since CUDA 11, before it refused; so here each one is opened once and closed once.
    """

    def __init__(self, runtime: CudaRuntime, executor: Executor) -> None:
        """`executor` closes what nobody uses any more: the driver may take its time, and holds the GIL meanwhile."""
        self.runtime = runtime
        self._executor = executor
        self._open: dict[tuple[str, str], Mapping] = {}
        self._counting = threading.Lock()
        self._opening = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, export: PoolExport, fd: int) -> Mapping:
        """The pool's mapping with one user more, who must give it back. Raises NoTransportError, HandoverProtocolError."""
        if export.process_id == self.runtime.process_id:
            raise NoTransportError("the pool is this process's own, and CUDA opens no handle where it was made")
        key = export.process_id, export.pool_id
        with self._opening:
            with self._counting:
                known = self._open.get(key)
                if known is not None:
                    known.num_users += 1
                    return known
            generations = map_generations(fd, export)
            try:
                mapping = self._map(export, generations)
            except CudaError as error:
                raise NoTransportError(f"CUDA does not open prefill's pool: {error}") from error
            with self._counting:
                self._open[key] = mapping
            return mapping

    def _map(self, export: PoolExport, generations: Numbers) -> Mapping:
        address = self.runtime.ipc_open(bytes.fromhex(export.handle))
        try:
            return Mapping(self.runtime, export, address, generations)
        except BaseException:
            self.runtime.ipc_close(address)
            raise

    def use(self, mapping: Mapping) -> None:
        """One user more of a mapping that has one."""
        with self._counting:
            mapping.num_users += 1

    def give_back(self, mapping: Mapping) -> None:
        """One user less; behind the last one the pool is closed. No wait."""
        with self._counting:
            mapping.num_users -= 1
            if mapping.num_users:
                return
        try:
            self._executor.submit(self._close, mapping)
        except RuntimeError:  # the executor has ended before its process
            self._close(mapping)

    def _close(self, mapping: Mapping) -> None:
        with self._opening:
            with self._counting:
                if mapping.num_users or not mapping.address:
                    return  # somebody paired anew meanwhile, or this was done
                self._open = {key: one for key, one in self._open.items() if one is not mapping}
            try:
                mapping.close()
            except CudaError:
                _log.exception("a pool of a prefill instance could not be closed: its memory stays taken")
