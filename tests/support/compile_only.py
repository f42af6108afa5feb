"""Triton kernels compiled, ptxas included, for a card that is not here: what their launchers ask for, on CPU tensors, is compiled and not launched.

Only in a process in which kernels are not interpreted: TRITON_INTERPRET must not be set when they are imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as one launch asked for it."""

    name: str
    hash: str
    """Of what was compiled and how: equal where one binary serves both."""
    shared_bytes: int
    """Of shared memory, for a program."""
    ptx: str

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether it has any matrix instruction."""
        return any(instruction in self.ptx for instruction in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))


class _AbsentDriver:
    """Knows the card's kind and nothing else."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> list[Compiled]:
    """From now on launches in this process compile for compute capability 80, 90 and so on; the list fills with them. Once in a process."""
    found: list[Compiled] = []
    launch = JITFunction.run

    def compile_kernel(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        found.append(Compiled(self.__name__, kernel.hash, kernel.metadata.shared, kernel.asm["ptx"]))
        return kernel

    driver.set_active(_AbsentDriver(capability))
    JITFunction.run = compile_kernel
    return found
