"""gpu-check without a GPU: it says so, it needs nothing that a GPU machine may lack, and on the fake it runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.cuda_check import GpuCheck, Sizes
from checks.cuda_peer import Peer, PeerFailedError, Work, answer
from checks.cuda_work import CudaWork
from checks.verdict import Check
from kvtransfer.cuda_runtime import CudaError
from tests.support.fake_cuda import FakeDriver, FakeRuntime

_ROOT = Path(__file__).parent.parent.parent


class _FakeWork(CudaWork):
    """With the fake in place of what only a GPU has."""

    def __init__(self, runtime: FakeRuntime, driver: FakeDriver) -> None:
        super().__init__(runtime)
        self._driver = driver

    def set_max_ctas(self, max_ctas: int) -> None:
        pass

    def free_bytes(self) -> int:
        return self._driver.free_bytes()

    def environment(self) -> dict[str, str]:
        return {"gpu": "none"}

    def memcpy_speed(self, num_bytes: int, rounds: int) -> float:
        return 1.0

    def products(self) -> Callable[[], float]:
        return lambda: 1e-4


class _LocalPeer(Peer):
    """A process that is none."""

    def __init__(self, name: str, driver: FakeDriver) -> None:
        self.name = name
        self._fake = FakeRuntime(driver)
        self._work = _FakeWork(self._fake, driver)

    def call_for_fds(self, method: str, *arguments: object, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        self._work.received_fds, self._work.sent_fds = [os.dup(fd) for fd in fds], []
        outcome, value = answer(self._work, method, arguments)
        if outcome != "ok":
            raise (CudaError if outcome == "cuda" else PeerFailedError)(value)
        return value, [os.dup(fd) for fd in self._work.sent_fds]

    def kill(self) -> None:
        self._fake.kill()

    def close(self) -> None:
        self.kill()


def test_it_runs_from_end_to_end_on_the_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    driver = FakeDriver()
    check = Check("gpu-check")
    run = GpuCheck(check, Sizes(16 << 20, 4 << 20, 32 << 20, 1), lambda name: _LocalPeer(name, driver))
    run.run()
    with pytest.raises(SystemExit) as ended:
        check.end(run.values)
    assert ended.value.code == 0, capsys.readouterr().out
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("OK gpu-check rules=12/12 memcpy_gbps=") and "gather_2m_gbps=" in line and "slow_down=" in line
    assert json.loads((tmp_path / "out" / "gpu-check.json").read_text())["broken_rules"] == []


def test_a_broken_rule_and_wrong_bytes_miss_a_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Corrupts(_LocalPeer):
        def call_for_fds(self, method: str, *arguments: object, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
            value, received = super().call_for_fds(method, *arguments, fds=fds)
            return (b"\0" * len(value) if method == "runtime_call" and arguments[0] == "copy_to_host" else value), received

        def close(self) -> None:
            super().close()

    monkeypatch.chdir(tmp_path)
    driver = FakeDriver()
    check = Check("gpu-check")
    GpuCheck(check, Sizes(16 << 20, 4 << 20, 32 << 20, 1), lambda name: Corrupts(name, driver)).run()
    assert len(check.goals_missed) == 1 and "the_importer_reads_what_the_exporter_wrote" in check.goals_missed[0]


def _run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=_ROOT, check=False)


def test_without_a_gpu_it_says_so_in_one_line_and_ends_with_0() -> None:
    ended = _run("-m", "checks.gpu")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("SKIP gpu-check no GPU: ") and ended.stdout.count("\n") == 1


def test_it_imports_neither_grpc_nor_protobuf_nor_xxhash() -> None:
    code = """
import sys
for name in ("grpc", "google.protobuf", "xxhash", "tandem", "cupy"):
    sys.modules[name] = None
import checks.gpu, checks.cuda_check, checks.cuda_peer, checks.cuda_work
"""
    ended = _run(code=code)
    assert ended.returncode == 0, ended.stderr


def alone() -> Work:
    """A process's work in the tests below: a fake GPU of its own."""
    driver = FakeDriver()
    return _FakeWork(FakeRuntime(driver), driver)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer("decode", "tests.kvtransfer.test_gpu_check:alone")
    yield peer
    peer.close()


def test_a_process_answers_passes_descriptors_and_hands_on_errors(peer: Peer) -> None:
    address = peer.runtime.malloc(4096)
    peer.runtime.copy_from_host(address, b"abc")
    assert peer.runtime.copy_to_host(address, 3) == b"abc"
    with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
        peer.runtime.free(1)
    with pytest.raises(PeerFailedError, match="it was not made"):
        peer.call("pool_digests", [0])
    payload, fds = peer.call_for_fds("make_pool", 8 << 10, 64 << 10, 1)
    assert os.fstat(fds[0]).st_size == 8 * 4
    with pytest.raises(PeerFailedError, match="this process's own"):
        peer.call("open_pool", payload, 1, fds=fds)
    os.close(fds[0])


def test_a_killed_process_is_an_error_and_not_a_wait(peer: Peer) -> None:
    peer.call("free_bytes")
    started = time.monotonic()
    peer.kill()
    with pytest.raises(PeerFailedError, match="decode is gone in free_bytes"):
        peer.call("free_bytes")
    assert time.monotonic() - started < 10
