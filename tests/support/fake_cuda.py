"""A fake of CUDA's runtime that enforces its rules: one driver, and one runtime for each "process" that shares its GPUs.

It is stricter than a GPU, which lets many of these mistakes pass unseen. Each rule names where it comes from; "Runtime API" is NVIDIA's CUDA Runtime API
reference manual, section "Device Management", function by function.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtransfer import xxh3
from kvtransfer.cuda_runtime import HANDLE_BYTES, CudaError, Gather, Numbers

Bytes = npt.NDArray[np.uint8]
_FIRST_ADDRESS, _BETWEEN_ADDRESSES = 0x7F00_0000_0000, 1 << 36
"""So far apart that an address past the end of an allocation is never within another."""


@dataclass(eq=False)
class _Allocation:
    owner: FakeRuntime
    content: Bytes
    handle: bytes = field(default_factory=lambda: secrets.token_bytes(HANDLE_BYTES))
    freed: bool = False
    importers: set[FakeRuntime] = field(default_factory=set)
    num_kernels: int = 0
    """Launched ones that read or write it."""


@dataclass(eq=False)
class _Launch:
    work: Callable[[], None]
    touched: tuple[_Allocation, ...]
    done: bool = False
    failed: str = ""
    num_looks: int = 0


class FakeDriver:
    """What all processes of a host share: GPUs, allocations, handles."""

    def __init__(self, *, peers: frozenset[frozenset[str]] = frozenset(), total_bytes: int = 1 << 28) -> None:
        """`peers` are pairs of GPUs with access to each other; `total_bytes` is the memory of each GPU."""
        self.peers = peers
        self.total_bytes = total_bytes
        self.allocations: list[_Allocation] = []
        self.lock = threading.RLock()
        self._addresses = itertools.count(_FIRST_ADDRESS, _BETWEEN_ADDRESSES)

    def free_bytes(self, device_uuid: str = "gpu-0") -> int:
        """Memory that can be allocated on a GPU."""
        with self.lock:
            return self.total_bytes - sum(len(one.content) for one in self.allocations if one.owner.device_uuid == device_uuid)

    def address(self) -> int:
        """One that nothing else has, in any process: a pointer of one process means nothing in another."""
        return next(self._addresses)

    def drop_unused(self) -> None:
        """Rule: memory returns when the exporter has freed it (or is gone) and every importer has closed it (or is gone).

        Runtime API, cudaIpcCloseMemHandle: other imported mappings stay unaffected. An import that nobody closes pins a dead exporter's memory: LMCache #5265.
        """
        self.allocations = [one for one in self.allocations if not one.freed or one.importers]


class FakeRuntime:
    """CudaRuntime of one process.

    A kernel never runs at its launch. It runs when its event is looked at the second time; `late` ones when the test says so (`run`).
    """

    def __init__(self, driver: FakeDriver, device_uuid: str = "gpu-0", *, late: bool = False) -> None:
        self.process_id = secrets.token_hex(16)
        self.device_uuid = device_uuid
        self.late = late
        self.in_kernel: Callable[[], None] = lambda: None
        """Called in each gather before it copies."""
        self.fail_next = ""
        """A CUDA error's name: the next kernel fails with it when it runs."""
        self.num_opened = 0
        self._driver = driver
        self._mapped: dict[int, _Allocation] = {}
        self._imported: set[int] = set()
        self._streams: dict[int, deque[_Launch]] = {}
        self._events: dict[int, _Launch] = {}
        self._numbers = itertools.count(1)
        self._backing: deque[Bytes] = deque()
        self._dead = False

    def can_access_peer(self, importer_uuid: str) -> bool:
        """Runtime API, cudaDeviceCanAccessPeer."""
        return importer_uuid == self.device_uuid or frozenset((importer_uuid, self.device_uuid)) in self._driver.peers

    def back_next_malloc(self, content: Bytes) -> None:
        """The next allocation has its bytes here, at its start: so that a test's engine can write to it."""
        self._backing.append(content)

    def malloc(self, num_bytes: int) -> int:
        """See CudaRuntime."""
        with self._driver.lock:
            self._require_alive()
            if num_bytes > self._driver.free_bytes(self.device_uuid):
                raise CudaError("cudaErrorMemoryAllocation: out of memory")
            content = self._backing.popleft() if self._backing else np.zeros(num_bytes, np.uint8)
            assert len(content) >= num_bytes
            allocation = _Allocation(self, content[:num_bytes])
            self._driver.allocations.append(allocation)
            return self._map(allocation)

    def _map(self, allocation: _Allocation) -> int:
        address = self._driver.address()
        self._mapped[address] = allocation
        return address

    def free(self, address: int) -> None:
        """See CudaRuntime."""
        with self._driver.lock:
            allocation = self._mapped.get(address)
            if allocation is None or address in self._imported:
                raise CudaError("cudaErrorInvalidValue: not the start of an allocation of this process")
            # Rule: no free while a kernel reads. Of this process's own kernels cudaFree waits (Programming Guide, "Implicit Synchronization"), of others' it
            # knows nothing; "calling cudaFree on an exported memory region before calling cudaIpcCloseMemHandle in the importing context will result in
            # undefined behavior" (Runtime API, cudaIpcOpenMemHandle).
            if allocation.num_kernels:
                raise CudaError("undefined behaviour: a free while a kernel reads")
            if allocation.importers:
                raise CudaError("undefined behaviour: a free before the importers have closed")
            del self._mapped[address]
            allocation.freed = True
            self._driver.drop_unused()

    def ipc_get_handle(self, address: int) -> bytes:
        """See CudaRuntime."""
        with self._driver.lock:
            # Rule: a handle is of a whole allocation and opens at its base, so whoever means an address within it has to send the offset along.
            # Runtime API, cudaIpcGetMemHandle: "takes a pointer to the base of an existing device memory allocation"; torch sends the offset for this reason.
            if address not in self._mapped or address in self._imported:
                raise CudaError("cudaErrorInvalidValue: not the start of an allocation of this process")
            return self._mapped[address].handle

    def ipc_open(self, handle: bytes) -> int:
        """See CudaRuntime."""
        with self._driver.lock:
            self._require_alive()
            allocation = next((one for one in self._driver.allocations if one.handle == handle and not one.freed), None)
            if allocation is None:
                raise CudaError("cudaErrorInvalidResourceHandle: no allocation has this handle")
            # Rule: no open in the process that made the handle. "invalid device context", UCX #11603, and vllm #55906 for processes that look like one.
            if allocation.owner is self:
                raise CudaError("cudaErrorDeviceUninitialized: invalid device context")
            # Rule: no second open before the close. "May only be opened by one context per device per other process" (Runtime API of CUDA 4 to 10; an error,
            # UCX #3192 and #4599). Since CUDA 11 the manual has it that "the reference count on the handle is incremented by 1 and the existing device pointer
            # is returned"; who opens once is right with both.
            if self in allocation.importers:
                raise CudaError("cudaErrorAlreadyMapped: the handle is open in this process")
            if not allocation.owner.can_access_peer(self.device_uuid):
                raise CudaError("cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices")
            allocation.importers.add(self)
            self.num_opened += 1
            address = self._map(allocation)
            self._imported.add(address)
            return address

    def ipc_close(self, address: int) -> None:
        """See CudaRuntime."""
        with self._driver.lock:
            if address not in self._imported:
                raise CudaError("cudaErrorInvalidValue: nothing is open at this address")
            allocation = self._mapped[address]
            # Rule: no unmap under a reader. Runtime API, cudaIpcCloseMemHandle: it unmaps; UCX #4599 ("unmap only when there are no in-flight requests").
            if any(allocation in launch.touched and not launch.done for queue in self._streams.values() for launch in queue):
                raise CudaError("undefined behaviour: a close while a kernel reads")
            self._imported.remove(address)
            del self._mapped[address]
            allocation.importers.discard(self)
            self._driver.drop_unused()

    def new_stream(self) -> int:
        """See CudaRuntime."""
        stream = next(self._numbers)
        self._streams[stream] = deque()
        return stream

    def close_stream(self, stream: int) -> None:
        """See CudaRuntime."""
        if self._streams[stream]:
            raise CudaError("a stream is closed while work is on it: nobody would see its end")
        del self._streams[stream]

    def gather(self, stream: int, gather: Gather) -> int:
        """See CudaRuntime."""
        num_bytes = gather.block_bytes
        with self._driver.lock:
            self._require_alive()
            sources = [self._resolve(gather.source + int(block) * num_bytes, num_bytes) for block in gather.source_ids]
            destinations = [self._resolve(gather.destination + int(block) * num_bytes, num_bytes) for block in gather.destination_ids]

            def work() -> None:
                self.in_kernel()
                for (_, source), (_, destination) in zip(sources, destinations, strict=True):
                    destination[:] = source

            touched = tuple({id(allocation): allocation for allocation, _ in (*sources, *destinations)}.values())
            return self._launch(stream, work, touched)

    def record(self, stream: int) -> int:
        """See CudaRuntime."""
        return self._launch(stream, lambda: None, ())

    def _launch(self, stream: int, work: Callable[[], None], touched: tuple[_Allocation, ...]) -> int:
        with self._driver.lock:
            launch, event = _Launch(work, touched, failed=self.fail_next), next(self._numbers)
            self.fail_next = ""
            self._streams[stream].append(launch)
            self._events[event] = launch
            for allocation in touched:
                allocation.num_kernels += 1
            return event

    def run(self, num_kernels: int = 1) -> None:
        """Runs the oldest kernels of each stream."""
        for queue in self._streams.values():
            for _ in range(min(num_kernels, len(queue))):
                self._run(queue)

    def _run(self, queue: deque[_Launch]) -> None:
        # Rule: a stream's work runs in its order (Programming Guide, "Streams").
        launch = queue[0]
        if not launch.failed:
            launch.work()
        with self._driver.lock:
            queue.popleft()
            launch.done = True
            for allocation in launch.touched:
                allocation.num_kernels -= 1

    def is_done(self, event: int) -> bool:
        """See CudaRuntime. Rule: work on a stream is asynchronous to the host; only its event tells when it is done (Programming Guide, "Events")."""
        launch = self._events[event]
        launch.num_looks += 1
        if not self.late and launch.num_looks > 1:
            queue = next(queue for queue in self._streams.values() if launch in queue) if not launch.done else deque()
            while not launch.done:
                self._run(queue)
        if launch.done and launch.failed:
            raise CudaError(launch.failed)
        return launch.done

    def close_event(self, event: int) -> None:
        """See CudaRuntime."""
        if not self._events[event].done:
            raise CudaError("an event is closed before it is done: nobody would see the end of its work")
        del self._events[event]

    def copy_to_host(self, address: int, num_bytes: int) -> bytes:
        """See CudaRuntime."""
        with self._driver.lock:
            return self._resolve(address, num_bytes)[1].tobytes()

    def copy_from_host(self, address: int, content: bytes) -> None:
        """See CudaRuntime."""
        with self._driver.lock:
            self._resolve(address, len(content))[1][:] = np.frombuffer(content, np.uint8)

    def xxh3_accumulators(self, address: int, ids: Numbers, block_bytes: int) -> npt.NDArray[np.uint64]:
        """See CudaRuntime."""
        with self._driver.lock:
            return xxh3.accumulators(np.stack([self._resolve(address + int(block) * block_bytes, block_bytes)[1] for block in ids]))

    def array(self, address: int, num_blocks: int, block_bytes: int) -> Bytes:
        """See CudaRuntime."""
        return self.view(address, num_blocks * block_bytes).reshape(num_blocks, block_bytes)

    def settle(self) -> None:
        """See CudaRuntime: an assignment is done when it returns."""

    def view(self, address: int, num_bytes: int) -> Bytes:
        """The bytes themselves, for a test's own eyes."""
        with self._driver.lock:
            return self._resolve(address, num_bytes)[1]

    def _resolve(self, address: int, num_bytes: int) -> tuple[_Allocation, Bytes]:
        """Rule: no address outside an allocation that is mapped here, none after its close.

        "cudaErrorIllegalAddress" (Runtime API, cudaError_t), if a GPU sees it at all.
        """
        base = max((one for one in self._mapped if one <= address), default=0)
        allocation = self._mapped.get(base)
        if allocation is None or address - base + num_bytes > len(allocation.content):
            raise CudaError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        return allocation, allocation.content[address - base : address - base + num_bytes]

    def _require_alive(self) -> None:
        if self._dead:
            raise CudaError("cudaErrorContextIsDestroyed: the process is dead")

    def kill(self) -> None:
        """SIGKILL: the driver frees what the process had and closes what it had open. A kernel of another process that reads it goes on reading."""
        with self._driver.lock:
            self._dead = True
            for address, allocation in list(self._mapped.items()):
                if address in self._imported:
                    allocation.importers.discard(self)
                else:
                    allocation.freed = True
            self._mapped.clear()
            self._imported.clear()
            for queue in self._streams.values():
                for launch in queue:
                    for allocation in launch.touched:
                        allocation.num_kernels -= 1
            self._streams.clear()
            self._driver.drop_unused()

    @property
    def num_launched(self) -> int:
        """Kernels that have not run."""
        return sum(len(queue) for queue in self._streams.values())

    @property
    def num_streams(self) -> int:
        """Streams that were not closed."""
        return len(self._streams)

    @property
    def num_open(self) -> int:
        """Handles that are open here."""
        return len(self._imported)
