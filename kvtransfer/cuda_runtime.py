"""The part of the CUDA runtime that KV transfer uses, as a seam: what is behind it here is CuPy, and in tests a fake that enforces CUDA's rules."""

from __future__ import annotations

import ctypes
import importlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer import xxh3
from kvtransfer.cuda_kernels import GATHER_THREADS, MAX_VECTORS, SOURCE, VECTOR_BYTES, XXH3_THREADS

CUDA_PROCESS_ID = secrets.token_hex(16)
"""Tells this process's memory from every other one's: CUDA opens no handle in the process that made it."""
HANDLE_BYTES = 64
Numbers = npt.NDArray[np.uint32]


class CudaError(Exception):
    """A call that CUDA refused, by CUDA's own name for it, or work on the device that failed."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Blocks to copy on the device: `source_ids[i]` to `destination_ids[i]`. Addresses of the blocks 0, and their size, are multiples of 16 bytes."""

    source: int
    source_ids: Numbers
    destination: int
    destination_ids: Numbers
    block_bytes: int

    def __post_init__(self) -> None:
        num_vectors = len(self.source_ids) * (self.block_bytes // VECTOR_BYTES)
        if len(self.source_ids) != len(self.destination_ids) or not 0 < num_vectors < MAX_VECTORS:
            raise ValueError(f"cannot gather {len(self.source_ids)} blocks of {self.block_bytes} bytes into {len(self.destination_ids)}")
        if any(number % VECTOR_BYTES for number in (self.source, self.destination, self.block_bytes)):
            raise ValueError(f"blocks of a gather must start at multiples of {VECTOR_BYTES} bytes and have that size")


class CudaRuntime(Protocol):
    """One GPU as one process sees it. Any thread may call; every call may block for as long as the driver does. All of them raise CudaError.

    Addresses are device addresses of this process. A handle is 64 secret bytes: who has them can read and write the whole allocation.
    """

    process_id: str
    """See CUDA_PROCESS_ID."""
    device_uuid: str

    def can_access_peer(self, importer_uuid: str) -> bool:
        """Whether the GPU of this UUID can read this one's memory; False too for one that this process cannot see."""
        ...

    def malloc(self, num_bytes: int) -> int:
        """An allocation of its own, which is all that its handle will give away."""
        ...

    def free(self, address: int) -> None:
        """Waits for the device's work. Never while another process has the allocation open: CUDA leaves undefined what happens then."""
        ...

    def ipc_get_handle(self, address: int) -> bytes:
        """The handle of the whole allocation that starts at this address."""
        ...

    def ipc_open(self, handle: bytes) -> int:
        """Address at which another process's allocation starts here. Once for each handle, until it is closed."""
        ...

    def ipc_close(self, address: int) -> None:
        """Unmaps it. Never before the last kernel that reads it has ended."""
        ...

    def new_stream(self) -> int:
        """A stream beside the engine's, of the lowest priority."""
        ...

    def close_stream(self, stream: int) -> None:
        """Gives it back; what is on it still runs to its end."""
        ...

    def gather(self, stream: int, gather: Gather) -> int:
        """Puts one kernel on the stream and returns an event that is done when it has ended; the event must be closed."""
        ...

    def record(self, stream: int) -> int:
        """An event behind all that is on the stream now; it must be closed."""
        ...

    def is_done(self, event: int) -> bool:
        """Does not wait. Raises CudaError when work before the event failed; nothing of it runs any more then."""
        ...

    def close_event(self, event: int) -> None:
        """Gives back a done event, or one whose work failed."""
        ...

    def copy_to_host(self, address: int, num_bytes: int) -> bytes:
        """Waits for the copy, not for work on any other stream."""
        ...

    def copy_from_host(self, address: int, content: bytes) -> None:
        """As copy_to_host."""
        ...

    def xxh3_accumulators(self, address: int, ids: Numbers, block_bytes: int) -> npt.NDArray[np.uint64]:
        """Of each of these blocks what xxh3.finish makes its digest from, [num_blocks, 8]. As copy_to_host."""
        ...

    def array(self, address: int, num_blocks: int, block_bytes: int) -> Any:
        """These blocks as a device array, [num_blocks, block_bytes] of uint8, that slices, reshapes and assigns as numpy's do; for the calling thread."""
        ...

    def settle(self) -> None:
        """Returns when what the calling thread has assigned to arrays is done."""
        ...


def ids_of(ids: Sequence[int] | npt.NDArray[np.int64]) -> Numbers:
    """Block ids, or generations, as kernels take them."""
    return np.asarray(ids, np.uint32)


@dataclass(slots=True)
class _Room:
    """Where block ids of one launch are, in pinned memory and on the device."""

    host: int
    device: int
    num_ids: int


_MIN_IDS = 1 << 14
# cudaError, cudaMemcpyKind and flags by their numbers, which CUDA keeps; CuPy has not always given them names.
_NOT_READY = 600
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2


class CupyRuntime:
    """CUDA by way of CuPy (14 or newer), on one of the visible GPUs. Opening and closing a handle hold the GIL: CuPy does not release it there."""

    def __init__(self, device: int = 0, *, max_ctas: int = 32) -> None:
        """`max_ctas` bounds what a gather takes from the engine's own kernels. Raises ImportError without CuPy, CudaError without a GPU."""
        cupy: Any = importlib.import_module("cupy")
        self.process_id = CUDA_PROCESS_ID
        self.max_ctas = max_ctas
        self._cupy = cupy
        self._cuda: Any = cupy.cuda.runtime
        self._device = device
        self._rooms: list[_Room] = []
        self._events: dict[int, _Room | None] = {}
        self._lock = threading.Lock()
        with self._on_device():
            self.device_uuid = self._uuid(device)
            module = cupy.RawModule(code=SOURCE)
            self._gather, self._xxh3 = module.get_function("tandem_gather"), module.get_function("tandem_xxh3")
            for kernel in (self._gather, self._xxh3):
                kernel.compile()
            self._copies = self.new_stream()
            self._copies_as_current = cupy.cuda.ExternalStream(self._copies)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """A thread's first call of CUDA finds no context without this; errors come out as the seam's own."""
        try:
            self._cuda.setDevice(self._device)
            yield
        except (RuntimeError, self._cupy.cuda.compiler.CompileException) as error:  # CuPy's errors of runtime and driver are RuntimeErrors
            raise CudaError(str(error)) from error

    def _uuid(self, device: int) -> str:
        # Not from CuPy's device properties, where a UUID passes through a C string and ends at its first zero byte.
        driver, uuid, handle = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(16), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(handle), device) or driver.cuDeviceGetUuid_v2(uuid, handle):
            raise CudaError(f"the UUID of GPU {device} cannot be read")
        return uuid.raw.hex()

    def can_access_peer(self, importer_uuid: str) -> bool:
        """See CudaRuntime."""
        with self._on_device():
            for device in range(self._cuda.getDeviceCount()):
                if self._uuid(device) == importer_uuid:
                    return device == self._device or bool(self._cuda.deviceCanAccessPeer(device, self._device))
        return False

    def malloc(self, num_bytes: int) -> int:
        """See CudaRuntime: plain cudaMalloc, since memory from CuPy's or torch's pools shares its allocation or cannot be exported at all."""
        with self._on_device():
            return int(self._cuda.malloc(num_bytes))

    def free(self, address: int) -> None:
        """See CudaRuntime."""
        with self._on_device():
            self._cuda.free(address)

    def ipc_get_handle(self, address: int) -> bytes:
        """See CudaRuntime."""
        with self._on_device():
            return bytes(self._cuda.ipcGetMemHandle(address))

    def ipc_open(self, handle: bytes) -> int:
        """See CudaRuntime."""
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        with self._on_device():
            return int(self._cuda.ipcOpenMemHandle(handle))

    def ipc_close(self, address: int) -> None:
        """See CudaRuntime."""
        with self._on_device():
            self._cuda.ipcCloseMemHandle(address)

    def new_stream(self) -> int:
        """See CudaRuntime."""
        with self._on_device():
            # 0 is the lowest priority: greater ones than the driver's range are taken as its end.
            return int(self._cuda.streamCreateWithPriority(_STREAM_NON_BLOCKING, 0))

    def close_stream(self, stream: int) -> None:
        """See CudaRuntime."""
        with self._on_device():
            self._cuda.streamDestroy(stream)

    def gather(self, stream: int, gather: Gather) -> int:
        """See CudaRuntime."""
        num_blocks, vectors = len(gather.source_ids), gather.block_bytes // VECTOR_BYTES
        num_ctas = min(self.max_ctas, -(-num_blocks * vectors // GATHER_THREADS))
        with self._on_device(), self._room_of(2 * num_blocks) as room:
            self._upload(room, np.concatenate([gather.source_ids, gather.destination_ids]), stream)
            arguments = (np.intp(gather.source), np.intp(gather.destination), np.intp(room.device), np.uint32(num_blocks), np.uint32(vectors))
            with self._cupy.cuda.ExternalStream(stream):
                self._gather((num_ctas,), (GATHER_THREADS,), arguments)
            return self._record(stream, room)

    def record(self, stream: int) -> int:
        """See CudaRuntime."""
        with self._on_device():
            return self._record(stream, None)

    def _record(self, stream: int, room: _Room | None) -> int:
        event = int(self._cuda.eventCreateWithFlags(_EVENT_DISABLE_TIMING))
        self._events[event] = room
        self._cuda.eventRecord(event, stream)
        return event

    def is_done(self, event: int) -> bool:
        """See CudaRuntime."""
        with self._on_device():
            status = int(self._cuda.eventQuery(event))  # a status, not an exception
            if status not in (0, _NOT_READY):
                raise CudaError(str(self._cuda.CUDARuntimeError(status)))
            return status == 0

    def close_event(self, event: int) -> None:
        """See CudaRuntime."""
        room = self._events.pop(event)
        if room is not None:
            with self._lock:
                self._rooms.append(room)
        with self._on_device():
            self._cuda.eventDestroy(event)

    def copy_to_host(self, address: int, num_bytes: int) -> bytes:
        """See CudaRuntime."""
        content = np.empty(num_bytes, np.uint8)
        self._copy(content.ctypes.data, address, num_bytes, _DEVICE_TO_HOST)
        return content.tobytes()

    def copy_from_host(self, address: int, content: bytes) -> None:
        """See CudaRuntime."""
        held = np.frombuffer(content, np.uint8)
        self._copy(address, held.ctypes.data, len(held), _HOST_TO_DEVICE)

    def _copy(self, to: int, source: int, num_bytes: int, kind: int) -> None:
        with self._on_device():
            self._cuda.memcpyAsync(to, source, num_bytes, kind, self._copies)
            self._cuda.streamSynchronize(self._copies)

    def xxh3_accumulators(self, address: int, ids: Numbers, block_bytes: int) -> npt.NDArray[np.uint64]:
        """See CudaRuntime."""
        num_threads = len(ids) * xxh3.NUM_ACCUMULATORS
        result = np.empty((len(ids), xxh3.NUM_ACCUMULATORS), np.uint64)
        # Accumulators go where ids go: two ids take as much as one accumulator.
        with self._on_device(), self._room_of(len(ids) + 2 * num_threads + 1) as room:
            accumulators = room.device + 8 * (-(-len(ids) // 2))
            self._upload(room, ids, self._copies)
            arguments = (np.intp(address), np.intp(room.device), np.intp(accumulators), np.uint32(len(ids)), np.uint64(block_bytes // 8))
            with self._cupy.cuda.ExternalStream(self._copies):
                self._xxh3((-(-num_threads // XXH3_THREADS),), (XXH3_THREADS,), arguments)
            self._cuda.memcpyAsync(result.ctypes.data, accumulators, result.nbytes, _DEVICE_TO_HOST, self._copies)
            self._cuda.streamSynchronize(self._copies)
            with self._lock:
                self._rooms.append(room)
        return result

    def array(self, address: int, num_blocks: int, block_bytes: int) -> Any:
        """See CudaRuntime."""
        with self._on_device():
            # Not the thread's default stream: that one waits for the engine's steps, and they for it.
            self._copies_as_current.use()
            memory = self._cupy.cuda.UnownedMemory(address, num_blocks * block_bytes, None, self._device)
            return self._cupy.ndarray((num_blocks, block_bytes), np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))

    def settle(self) -> None:
        """See CudaRuntime."""
        with self._on_device():
            self._cuda.streamSynchronize(self._copies)

    @contextmanager
    def _room_of(self, num_ids: int) -> Iterator[_Room]:
        """Room for a launch, whose owner gives it back when the launch has ended; after a failure nobody knows when that is, and it is lost."""
        with self._lock:
            room = next((one for one in self._rooms if one.num_ids >= num_ids), None)
            if room is not None:
                self._rooms.remove(room)
        if room is None:
            size = max(_MIN_IDS, 1 << (num_ids - 1).bit_length())
            room = _Room(int(self._cuda.hostAlloc(4 * size, 0)), int(self._cuda.malloc(4 * size)), size)
        yield room

    def _upload(self, room: _Room, ids: Numbers, stream: int) -> None:
        ctypes.memmove(room.host, ids.ctypes.data, ids.nbytes)
        self._cuda.memcpyAsync(room.device, room.host, ids.nbytes, _HOST_TO_DEVICE, stream)
