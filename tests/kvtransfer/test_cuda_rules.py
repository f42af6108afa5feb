"""The rules that gpu-check holds against CUDA, held against the fake; and what only the fake can be asked, since a GPU may let it pass or not survive it."""

from __future__ import annotations

import numpy as np
import pytest

from checks.cuda_rules import KILLING_RULES, RULES, Rule, RuleBrokenError, TwoProcesses
from kvtransfer.cuda_runtime import CudaError, Gather, ids_of
from tests.support.fake_cuda import FakeDriver, FakeRuntime


def _two(*, late: bool = False) -> tuple[FakeRuntime, FakeRuntime, TwoProcesses]:
    driver = FakeDriver()
    exporter, importer = FakeRuntime(driver), FakeRuntime(driver, late=late)
    return exporter, importer, TwoProcesses(exporter, importer, exporter.kill, importer.kill, driver.free_bytes, 1 << 24)


@pytest.mark.parametrize("rule", [*RULES, *KILLING_RULES], ids=lambda rule: rule.__name__)
def test_the_fake_keeps(rule: Rule) -> None:
    rule(_two()[2])


def test_a_rule_that_is_broken_is_found() -> None:
    class OpensItsOwn(FakeRuntime):
        def ipc_open(self, handle: bytes) -> int:
            return 1

    driver = FakeDriver()
    exporter = OpensItsOwn(driver)
    two = TwoProcesses(exporter, FakeRuntime(driver), exporter.kill, exporter.kill, driver.free_bytes, 1 << 24)
    broken = [rule.__name__ for rule in RULES if _breaks(rule, two)]
    assert broken == ["no_handle_is_opened_in_the_process_that_made_it"]


def _breaks(rule: Rule, two: TwoProcesses) -> bool:
    try:
        rule(two)
    except RuleBrokenError:
        return True
    return False


def test_no_address_outside_the_allocation() -> None:
    exporter, importer, _ = _two()
    address = exporter.malloc(4096)
    opened = importer.ipc_open(exporter.ipc_get_handle(address))
    for outside in (opened + 4096, opened + 4090, opened - 16):
        with pytest.raises(CudaError, match="illegal memory access"):
            importer.copy_to_host(outside, 16)
    with pytest.raises(CudaError, match="illegal memory access"):
        importer.copy_to_host(address, 16)  # the exporter's own address


def test_a_late_kernel_has_not_copied_before_its_event() -> None:
    exporter, importer, _ = _two(late=True)
    address, landing, stream = exporter.malloc(256), importer.malloc(256), importer.new_stream()
    exporter.copy_from_host(address, b"\1" * 256)
    opened = importer.ipc_open(exporter.ipc_get_handle(address))
    event = importer.gather(stream, Gather(opened, ids_of([0]), landing, ids_of([0]), 256))
    assert not any(importer.is_done(event) for _ in range(5))
    assert importer.copy_to_host(landing, 256) == bytes(256)
    for close, what in ((importer.close_event, event), (importer.ipc_close, opened), (importer.close_stream, stream)):
        with pytest.raises(CudaError):
            close(what)
    importer.run()
    assert importer.is_done(event) and importer.copy_to_host(landing, 256) == b"\1" * 256


def test_no_free_while_a_kernel_of_another_process_reads_or_the_handle_is_open() -> None:
    exporter, importer, _ = _two(late=True)
    address, landing, stream = exporter.malloc(256), importer.malloc(256), importer.new_stream()
    opened = importer.ipc_open(exporter.ipc_get_handle(address))
    event = importer.gather(stream, Gather(opened, ids_of([0]), landing, ids_of([0]), 256))
    with pytest.raises(CudaError, match="while a kernel reads"):
        exporter.free(address)
    importer.run()
    importer.close_event(event)
    with pytest.raises(CudaError, match="before the importers have closed"):
        exporter.free(address)
    importer.ipc_close(opened)
    exporter.free(address)


def test_memory_that_is_not_there_is_refused() -> None:
    runtime = FakeRuntime(FakeDriver(total_bytes=4096))
    runtime.malloc(4000)
    with pytest.raises(CudaError, match="out of memory"):
        runtime.malloc(97)


@pytest.mark.parametrize(
    ("source", "ids", "to", "block_bytes"),
    [(0, [0], [0, 1], 16), (0, [], [], 16), (8, [0], [0], 16), (0, [0], [0], 24), (0, [0], [0], 0), (0, list(range(4)), list(range(4)), 1 << 34)],
)
def test_a_gather_that_the_kernel_cannot_do_is_none(source: int, ids: list[int], to: list[int], block_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"gather|blocks"):
        Gather(source, np.array(ids, np.uint32), 0, np.array(to, np.uint32), block_bytes)
