"""The CUDA kernels compiled for the CPU, and a stand-in for the part of CuPy that CupyRuntime calls, in host memory: its calls take what CuPy 14.2's take."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

# One CTA behind the other, one thread behind the other: the kernels need nothing of each other's threads.
_ON_CPU = """
#define __global__
#define __device__ static
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
struct Index { unsigned int x; };
static Index blockIdx, threadIdx, blockDim, gridDim;
"""
_LAUNCHERS = """
extern "C" void launch_gather(unsigned ctas, unsigned threads, const void* source, void* destination, const unsigned* ids, unsigned blocks, unsigned vectors) {
  gridDim.x = ctas; blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) tandem_gather((const Vector*)source, (Vector*)destination, ids, blocks, vectors);
}
extern "C" void launch_xxh3(unsigned ctas, unsigned threads, const void* blocks, const unsigned* ids, void* sums, unsigned num_blocks,
                            unsigned long long words) {
  gridDim.x = ctas; blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
      tandem_xxh3((const unsigned long long*)blocks, ids, (unsigned long long*)sums, num_blocks, words);
}
"""


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    """The kernels as functions launch_gather and launch_xxh3."""
    path = folder / "kernels.cpp"
    path.write_text(_ON_CPU + re.sub(r"#pragma unroll", "", source) + _LAUNCHERS)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", path.with_suffix(".so"), path], check=True, timeout=100)
    return ctypes.CDLL(str(path.with_suffix(".so")))


class CUDARuntimeError(RuntimeError):
    """As CuPy's: made of a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")


class CompileException(Exception):
    """As CuPy's."""


class _Kernel:
    """As CuPy's RawKernel: it takes grid, block and arguments, whose numpy types say how they are passed."""

    def __init__(self, launch: Any, types: tuple[type, ...]) -> None:
        self._launch, self._types = launch, types

    def compile(self) -> None:
        """Done before."""

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        assert tuple(type(argument) for argument in arguments) == self._types
        passed = [ctypes.c_void_p(int(one)) if type(one) is np.intp else ctypes.c_ulonglong(int(one)) for one in arguments]
        self._launch(grid[0], block[0], *passed)


class CupyOnCpu:
    """To be put in the place of the module `cupy`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._asked: dict[int, int] = {}
        self._last_done = 0
        self.num_allocations = 0
        self.status = 0
        """What every event comes to."""
        self.current_streams: list[int] = []
        names = ("malloc", "free", "hostAlloc", "memcpyAsync", "streamCreateWithPriority", "eventCreateWithFlags", "eventQuery", "eventDestroy")
        runtime = SimpleNamespace(
            **{name: getattr(self, f"_{name}") for name in names},
            CUDARuntimeError=CUDARuntimeError,
            setDevice=lambda device: None,
            getDeviceCount=lambda: 2,
            deviceCanAccessPeer=lambda device, peer: int((device, peer) == (1, 0)),
            streamSynchronize=lambda stream: None,
            streamDestroy=lambda stream: None,
            eventRecord=lambda event, stream: None,
            ipcGetMemHandle=lambda address: address.to_bytes(64, "little"),
            ipcOpenMemHandle=lambda handle: int.from_bytes(handle, "little"),
            ipcCloseMemHandle=lambda address: None,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            compiler=SimpleNamespace(CompileException=CompileException),
            ExternalStream=self._stream,
            UnownedMemory=lambda address, num_bytes, owner, device: (address, num_bytes),
            MemoryPointer=lambda memory, offset: memory[0] + offset,
        )

    @property
    def num_held(self) -> int:
        """Allocations that were not freed."""
        return len(self._memory)

    def RawModule(self, *, code: str) -> Any:
        """As CuPy's."""
        kernels = compiled(code, self._folder)
        of_gather, of_xxh3 = (np.intp, np.intp, np.intp, np.uint32, np.uint32), (np.intp, np.intp, np.intp, np.uint32, np.uint64)
        functions = {"tandem_gather": _Kernel(kernels.launch_gather, of_gather), "tandem_xxh3": _Kernel(kernels.launch_xxh3, of_xxh3)}
        return SimpleNamespace(get_function=functions.__getitem__)

    def ndarray(self, shape: tuple[int, int], dtype: type, pointer: int) -> npt.NDArray[np.uint8]:
        """As CuPy's, over memory that is there."""
        assert dtype is np.uint8
        content = np.frombuffer(memoryview((ctypes.c_uint8 * (shape[0] * shape[1])).from_address(pointer)), np.uint8)
        return content.reshape(shape)

    def _stream(self, stream: int) -> Any:
        class Current:
            def __enter__(current) -> None:
                self.current_streams.append(stream)

            def __exit__(current, *error: object) -> None:
                self.current_streams.pop()

            def use(current) -> None:
                pass

        return Current()

    def _malloc(self, num_bytes: int) -> int:
        if num_bytes > 1 << 40:
            raise CUDARuntimeError(2)
        memory = np.zeros(num_bytes + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._memory[address] = memory
        self.num_allocations += 1
        return address

    def _free(self, address: int) -> None:
        if address not in self._memory:
            raise CUDARuntimeError(1)
        del self._memory[address]

    def _hostAlloc(self, num_bytes: int, flags: int) -> int:
        return self._malloc(num_bytes)

    def _memcpyAsync(self, to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert kind in (1, 2)
        ctypes.memmove(to, source, num_bytes)

    def _streamCreateWithPriority(self, flags: int, priority: int) -> int:
        assert (flags, priority) == (1, 0)
        return len(self._asked) + 1000

    def _eventCreateWithFlags(self, flags: int) -> int:
        assert flags == 2
        event = max(self._asked, default=0) + 1
        self._asked[event] = 0
        return event

    def _eventQuery(self, event: int) -> int:
        self._asked[event] += 1
        if self._asked[event] > 1:
            self._last_done = max(self._last_done, event)
        return self.status if event <= self._last_done else 600

    def _eventDestroy(self, event: int) -> None:
        assert self._asked[event] > 0
