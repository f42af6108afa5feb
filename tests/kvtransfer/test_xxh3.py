"""Digests in two halves: xxhash says what they have to be, and the kernels' own source is compiled and run on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvtransfer import xxh3
from kvtransfer.cuda_kernels import SOURCE
from kvtransfer.cuda_pool import CudaBlocks
from kvtransfer.cuda_runtime import CudaError
from tests.support.cuda_on_cpu import compiled
from tests.support.fake_cuda import FakeDriver, FakeRuntime

_SIZES = (248, 256, 1024, 1032, 1040, 1088, 2048, 2112, 65536)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(SOURCE, tmp_path_factory.mktemp("kernels"))


def _blocks(num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(block_bytes).bytes(num_blocks * block_bytes), np.uint8).reshape(num_blocks, block_bytes)


@pytest.mark.parametrize("block_bytes", _SIZES)
def test_both_halves_make_the_digest_that_xxhash_makes(block_bytes: int) -> None:
    blocks = _blocks(3, block_bytes)
    digests = [xxh3.finish(row, block_bytes) for row in xxh3.accumulators(blocks).tolist()]
    assert digests == [xxhash.xxh3_64_intdigest(block.tobytes()) for block in blocks]


def test_short_blocks_have_no_accumulators() -> None:
    with pytest.raises(ValueError, match="at least 241 bytes"):
        xxh3.accumulators(_blocks(1, 240))


@pytest.mark.parametrize("block_bytes", _SIZES)
def test_the_kernels_source_makes_the_same_accumulators(kernels: ctypes.CDLL, block_bytes: int) -> None:
    blocks, ids = _blocks(9, block_bytes), np.array([8, 0, 3, 3, 7], np.uint32)
    found = np.zeros((len(ids), 8), np.uint64)
    pointers = (ctypes.c_void_p(blocks.ctypes.data), ctypes.c_void_p(ids.ctypes.data), ctypes.c_void_p(found.ctypes.data))
    kernels.launch_xxh3(2, 64, *pointers, len(ids), ctypes.c_ulonglong(block_bytes // 8))
    assert (found == xxh3.accumulators(blocks[ids])).all()


@pytest.mark.parametrize(("block_bytes", "ctas", "threads"), [(16, 1, 32), (48, 2, 32), (1024, 3, 32), (4096, 32, 512), (65536, 5, 96)])
def test_the_kernels_source_gathers_the_named_blocks_and_touches_no_other(kernels: ctypes.CDLL, block_bytes: int, ctas: int, threads: int) -> None:
    source, destination = _blocks(40, block_bytes), np.zeros((40, block_bytes), np.uint8)
    generator = np.random.default_rng(ctas)
    ids, to = (generator.permutation(40)[:23].astype(np.uint32) for _ in range(2))
    both = np.concatenate([ids, to])
    kernels.launch_gather(ctas, threads, *(ctypes.c_void_p(array.ctypes.data) for array in (source, destination, both)), len(ids), block_bytes // 16)
    due = np.zeros_like(destination)
    due[to] = source[ids]
    assert (destination == due).all()


@pytest.mark.parametrize("block_bytes", [128, 240, 256, 4096])
def test_blocks_on_a_gpu_have_the_digests_of_blocks_in_host_memory(block_bytes: int) -> None:
    runtime, blocks = FakeRuntime(FakeDriver()), _blocks(5, block_bytes)
    address = runtime.malloc(blocks.nbytes)
    runtime.copy_from_host(address, blocks.tobytes())
    memory = CudaBlocks(runtime, address, 5, block_bytes)
    assert memory.digests([4, 0, 0]) == [xxhash.xxh3_64_intdigest(blocks[block].tobytes()) for block in (4, 0, 0)]
    with pytest.raises(CudaError):
        memory.digests([5])


def test_blocks_that_no_vector_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        CudaBlocks(FakeRuntime(FakeDriver()), 256, 4, 72)
