"""What the cuda_ipc transport takes for granted about CUDA, rule by rule: held against the fake runtime in the tests, and against CUDA itself by gpu-check."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvtransfer import xxh3
from kvtransfer.cuda_runtime import CudaError, CudaRuntime, Gather, ids_of

_BLOCK_BYTES, _NUM_BLOCKS = 4096, 64
_POOL_BYTES = _BLOCK_BYTES * _NUM_BLOCKS
_MEMORY_S = 20.0
"""Longest time in which a dead process's memory has to be back."""


@dataclass
class TwoProcesses:
    """Two processes on one GPU, and what is told of both from outside."""

    exporter: CudaRuntime
    importer: CudaRuntime
    kill_exporter: Callable[[], None]
    """SIGKILL; returns when the process is gone."""
    kill_importer: Callable[[], None]
    free_bytes: Callable[[], int]
    """Free memory of the GPU."""
    large_bytes: int
    """An allocation whose coming and going cannot be mistaken for a process's other memory."""
    facts: dict[str, object] = field(default_factory=dict)
    """What CUDA may do either way, and did."""


class RuleBrokenError(AssertionError):
    """CUDA does not do what the transport takes for granted."""


def _require(held: bool, text: str) -> None:
    if not held:
        raise RuleBrokenError(text)


def _refused(call: Callable[[], object]) -> str:
    """What CUDA says to a call that it has to refuse."""
    try:
        call()
    except CudaError as error:
        return str(error)
    raise RuleBrokenError("CUDA allowed it")


def _content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(_POOL_BYTES)


def _export(two: TwoProcesses, content: bytes) -> tuple[int, bytes]:
    address = two.exporter.malloc(len(content))
    two.exporter.copy_from_host(address, content)
    return address, two.exporter.ipc_get_handle(address)


def _wait(runtime: CudaRuntime, event: int) -> None:
    ends = time.monotonic() + 30
    while not runtime.is_done(event):
        _require(time.monotonic() < ends, "a kernel did not end within 30 s")
        time.sleep(0.0002)
    runtime.close_event(event)


def the_importer_reads_what_the_exporter_wrote_at_every_offset(two: TwoProcesses) -> None:
    """The address of an open is that of the allocation's base."""
    content = _content(1)
    exported, handle = _export(two, content)
    opened = two.importer.ipc_open(handle)
    for offset in (0, 4096, 12345 * 16, _POOL_BYTES - 64):
        _require(two.importer.copy_to_host(opened + offset, 64) == content[offset : offset + 64], f"other bytes at offset {offset}")
    two.importer.ipc_close(opened)
    two.exporter.free(exported)


def no_handle_is_opened_in_the_process_that_made_it(two: TwoProcesses) -> None:
    """The transport never tries; where two processes look like one (PID namespaces), this is the error that they see."""
    exported, handle = _export(two, _content(2))
    two.facts["open_in_exporter"] = _refused(lambda: two.exporter.ipc_open(handle))
    two.exporter.free(exported)


def an_address_within_an_allocation_has_no_handle_of_its_own(two: TwoProcesses) -> None:
    """It is refused, or the handle is the whole allocation's: so the offset has to travel."""
    content = _content(3)
    exported, _ = _export(two, content)
    try:
        handle = two.exporter.ipc_get_handle(exported + 4096)
    except CudaError as error:
        two.facts["handle_of_inner_address"] = str(error)
    else:
        opened = two.importer.ipc_open(handle)
        two.facts["handle_of_inner_address"] = "the allocation's"
        _require(two.importer.copy_to_host(opened, 64) == content[:64], "the handle of an inner address opens somewhere else than at the base")
        two.importer.ipc_close(opened)
    two.exporter.free(exported)


def a_second_open_is_refused_or_counted(two: TwoProcesses) -> None:
    """Never a second mapping."""
    content = _content(4)
    exported, handle = _export(two, content)
    opened = two.importer.ipc_open(handle)
    try:
        again = two.importer.ipc_open(handle)
    except CudaError as error:
        two.facts["second_open"] = str(error)
    else:
        two.facts["second_open"] = "counted"
        _require(again == opened, "a second open gave a second address")
        two.importer.ipc_close(again)
        _require(two.importer.copy_to_host(opened, 64) == content[:64], "the first of two closes unmapped")
    two.importer.ipc_close(opened)
    two.exporter.free(exported)


def a_closed_handle_can_be_opened_again(two: TwoProcesses) -> None:
    """A pairing after another one."""
    content = _content(5)
    exported, handle = _export(two, content)
    two.importer.ipc_close(two.importer.ipc_open(handle))
    opened = two.importer.ipc_open(handle)
    _require(two.importer.copy_to_host(opened, 64) == content[:64], "other bytes behind the second open")
    two.importer.ipc_close(opened)
    two.exporter.free(exported)


def a_freed_allocations_handle_opens_nothing(two: TwoProcesses) -> None:
    """Nor does it open what comes to be at the same address later."""
    exported, handle = _export(two, _content(6))
    two.exporter.free(exported)
    later, later_handle = _export(two, _content(7))
    _require(later_handle != handle, "two allocations have the same handle")
    two.facts["open_after_free"] = _refused(lambda: two.importer.ipc_open(handle))
    two.exporter.free(later)


def a_gather_copies_the_named_blocks_and_no_other_byte(two: TwoProcesses) -> None:
    """Its event tells when."""
    content = _content(8)
    exported, handle = _export(two, content)
    opened, landing, stream = two.importer.ipc_open(handle), two.importer.malloc(_POOL_BYTES), two.importer.new_stream()
    two.importer.copy_from_host(landing, bytes(_POOL_BYTES))
    source_ids, to_ids = [7, 0, 63, 31], [1, 62, 0, 40]
    _wait(two.importer, two.importer.gather(stream, Gather(opened, ids_of(source_ids), landing, ids_of(to_ids), _BLOCK_BYTES)))
    due = bytearray(_POOL_BYTES)
    for source, to in zip(source_ids, to_ids, strict=True):
        due[to * _BLOCK_BYTES : (to + 1) * _BLOCK_BYTES] = content[source * _BLOCK_BYTES : (source + 1) * _BLOCK_BYTES]
    _require(two.importer.copy_to_host(landing, _POOL_BYTES) == bytes(due), "a gather left other bytes than it had to")
    two.importer.close_stream(stream)
    two.importer.ipc_close(opened)
    two.importer.free(landing)
    two.exporter.free(exported)


def a_stream_runs_its_work_in_order(two: TwoProcesses) -> None:
    """An event is done only when all before it is."""
    content = _content(9)
    exported, handle = _export(two, content)
    opened, landing, stream = two.importer.ipc_open(handle), two.importer.malloc(2 * _POOL_BYTES), two.importer.new_stream()
    every = ids_of(range(_NUM_BLOCKS))
    first = two.importer.gather(stream, Gather(opened, every, landing, every, _BLOCK_BYTES))
    second = two.importer.gather(stream, Gather(landing, every, landing + _POOL_BYTES, every, _BLOCK_BYTES))
    _wait(two.importer, second)
    _require(two.importer.is_done(first), "the second of two kernels was done first")
    two.importer.close_event(first)
    _require(two.importer.copy_to_host(landing + _POOL_BYTES, _POOL_BYTES) == content, "the second kernel read what the first had not written")
    two.importer.close_stream(stream)
    two.importer.ipc_close(opened)
    two.importer.free(landing)
    two.exporter.free(exported)


def digests_are_the_same_on_the_device_and_on_the_host(two: TwoProcesses) -> None:
    """At sizes that end within a round, at its end, and behind it."""
    for block_bytes in (256, 1024, 1040, 4096, 65536):
        num_blocks = 6
        content = np.frombuffer(np.random.default_rng(block_bytes).bytes(num_blocks * block_bytes), np.uint8).reshape(num_blocks, block_bytes)
        address = two.exporter.malloc(content.nbytes)
        two.exporter.copy_from_host(address, content.tobytes())
        ids = [5, 0, 3]
        found = two.exporter.xxh3_accumulators(address, ids_of(ids), block_bytes)
        _require(bool((found == xxh3.accumulators(content[ids])).all()), f"other digests of blocks of {block_bytes} bytes")
        two.exporter.free(address)


def nothing_is_read_through_a_closed_handle(two: TwoProcesses) -> None:
    """An error, never the old bytes."""
    exported, handle = _export(two, _content(10))
    opened = two.importer.ipc_open(handle)
    two.importer.ipc_close(opened)
    two.facts["read_after_close"] = _refused(lambda: two.importer.copy_to_host(opened, 64))
    two.exporter.free(exported)


def a_killed_exporters_memory_is_back_when_the_importer_has_closed_it(two: TwoProcesses) -> None:
    """And not before: the importer reads on without harm."""
    before, content = two.free_bytes(), _content(11)
    exported = two.exporter.malloc(two.large_bytes)
    two.exporter.copy_from_host(exported, content)
    opened = two.importer.ipc_open(two.exporter.ipc_get_handle(exported))
    taken = two.free_bytes()
    two.kill_exporter()
    _require(two.importer.copy_to_host(opened, _POOL_BYTES) == content, "the bytes changed with their exporter's death")
    two.facts["mib_back_after_exporters_death"] = (two.free_bytes() - taken) >> 20
    _require(two.free_bytes() - taken < two.large_bytes // 2, "the memory was given to others under a reader")
    two.importer.ipc_close(opened)
    _until_free(two, taken + two.large_bytes * 9 // 10)
    two.facts["mib_back_after_importers_close"] = (two.free_bytes() - taken) >> 20
    two.facts["mib_missing_in_the_end"] = max(before - two.free_bytes(), 0) >> 20


def a_killed_importer_leaves_the_exporters_memory_as_it_was(two: TwoProcesses) -> None:
    """Which goes when the exporter frees it."""
    content = _content(12)
    exported = two.exporter.malloc(two.large_bytes)
    two.exporter.copy_from_host(exported, content)
    two.importer.ipc_open(two.exporter.ipc_get_handle(exported))
    two.kill_importer()
    _require(two.exporter.copy_to_host(exported, _POOL_BYTES) == content, "the bytes changed with an importer's death")
    taken = two.free_bytes()
    two.exporter.free(exported)
    _until_free(two, taken + two.large_bytes * 9 // 10)


def _until_free(two: TwoProcesses, num_bytes: int) -> None:
    ends = time.monotonic() + _MEMORY_S
    while two.free_bytes() < num_bytes:
        _require(time.monotonic() < ends, f"the memory was not back within {_MEMORY_S:g} s")
        time.sleep(0.05)


Rule = Callable[[TwoProcesses], None]
RULES: tuple[Rule, ...] = (
    the_importer_reads_what_the_exporter_wrote_at_every_offset,
    no_handle_is_opened_in_the_process_that_made_it,
    an_address_within_an_allocation_has_no_handle_of_its_own,
    a_second_open_is_refused_or_counted,
    a_closed_handle_can_be_opened_again,
    a_freed_allocations_handle_opens_nothing,
    a_gather_copies_the_named_blocks_and_no_other_byte,
    a_stream_runs_its_work_in_order,
    digests_are_the_same_on_the_device_and_on_the_host,
    # The last one of two processes: a GPU may hold it against the whole process.
    nothing_is_read_through_a_closed_handle,
)
"""One pair of processes can serve all of these, in this order."""
KILLING_RULES: tuple[Rule, ...] = (
    a_killed_exporters_memory_is_back_when_the_importer_has_closed_it,
    a_killed_importer_leaves_the_exporters_memory_as_it_was,
)
"""Each needs two processes of its own."""
