"""CupyRuntime's own code, with host memory in place of the GPU's: the calls of CuPy that it makes, and the kernels that it launches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checks import cuda_rules
from kvtransfer import cuda_runtime
from kvtransfer.cuda_pool import CudaBlocks
from kvtransfer.cuda_runtime import CudaError, CupyRuntime, Gather, ids_of
from tests.support.cuda_on_cpu import CupyOnCpu


@pytest.fixture
def cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CupyOnCpu:
    cupy = CupyOnCpu(tmp_path)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(CupyRuntime, "_uuid", lambda self, device: f"gpu-{device}")
    return cupy


@pytest.mark.parametrize(
    "rule",
    [
        cuda_rules.the_importer_reads_what_the_exporter_wrote_at_every_offset,
        cuda_rules.a_closed_handle_can_be_opened_again,
        cuda_rules.a_gather_copies_the_named_blocks_and_no_other_byte,
        cuda_rules.a_stream_runs_its_work_in_order,
        cuda_rules.digests_are_the_same_on_the_device_and_on_the_host,
    ],
    ids=lambda rule: rule.__name__,
)
def test_rules_that_need_no_second_process_hold(cupy: CupyOnCpu, rule: cuda_rules.Rule) -> None:
    exporter, importer = CupyRuntime(), CupyRuntime()
    rule(cuda_rules.TwoProcesses(exporter, importer, lambda: None, lambda: None, lambda: 0, 0))
    assert cupy.current_streams == []


def test_room_for_block_ids_is_used_again_and_never_by_two_launches(cupy: CupyOnCpu) -> None:
    runtime = CupyRuntime()
    memory, stream = runtime.malloc(1024), runtime.new_stream()
    gather = Gather(memory, ids_of([0]), memory + 512, ids_of([0]), 256)
    before = cupy.num_allocations
    events = [runtime.gather(stream, gather) for _ in range(2)]
    assert cupy.num_allocations == before + 4  # pinned and on the device, for each
    for _ in range(5):
        for event in events:
            assert not runtime.is_done(event) or runtime.is_done(event)
            runtime.close_event(event)
        events = [runtime.gather(stream, gather) for _ in range(2)]
    assert cupy.num_allocations == before + 4


def test_cudas_errors_come_out_as_the_seams_own(cupy: CupyOnCpu) -> None:
    runtime = CupyRuntime()
    with pytest.raises(CudaError, match="status 2"):
        runtime.malloc(1 << 41)
    with pytest.raises(CudaError, match="status 1"):
        runtime.free(5)
    with pytest.raises(CudaError, match="64 bytes"):
        runtime.ipc_open(b"short")
    event = runtime.record(runtime.new_stream())
    assert not runtime.is_done(event)
    cupy.status = 700
    with pytest.raises(CudaError, match="status 700"):
        runtime.is_done(event)
    runtime.close_event(event)


def test_peer_access_is_asked_for_the_gpu_that_reads(cupy: CupyOnCpu) -> None:
    first, second = CupyRuntime(0), CupyRuntime(1)
    assert first.can_access_peer("gpu-0") and first.can_access_peer("gpu-1")
    assert not second.can_access_peer("gpu-0")
    assert not first.can_access_peer("gpu-9")  # not visible here


def test_blocks_are_an_array_that_assigns(cupy: CupyOnCpu) -> None:
    runtime = CupyRuntime()
    memory = CudaBlocks(runtime, runtime.malloc(4 * 256), 4, 256)
    memory.array[2, 16:32] = 7
    memory.settle()
    assert runtime.copy_to_host(memory.address + 2 * 256, 32) == bytes(16) + b"\7" * 16
    held = cupy.num_held
    room = memory.room(2, 512)
    assert cupy.num_held == held + 1
    del room
    assert cupy.num_held == held


def test_without_cupy_the_seam_can_be_imported_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cuda_runtime.CUDA_PROCESS_ID
    with pytest.raises(ImportError, match="cupy"):
        CupyRuntime()
