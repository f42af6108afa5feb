"""One call copies the right blocks, and a stop ends it within a block; without a compiler too."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.kernels import build
from kvtransfer import block_copy
from kvtransfer.block_copy import CopyStop, build_native_copy, copy_blocks, load_copy, numpy_copy
from kvtransfer.memories import Blocks

_STREAMED = 64 << 10  # 32 blocks of this size go past the caches


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the native copy is compiled, once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=["native", "numpy"])
def copying(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """copy_blocks through either."""
    monkeypatch.setattr(block_copy, "_loaded", [build_native_copy(kernel_cache, "c++") if request.param == "native" else numpy_copy])


def _pools(num_blocks: int, block_bytes: int, offset: int = 0) -> tuple[Blocks, Blocks]:
    """Random bytes and zeros; `offset` moves both away from any alignment."""
    random = np.random.default_rng(block_bytes)
    source = random.integers(0, 256, num_blocks * block_bytes + offset, np.uint8)[offset:]
    return source.reshape(num_blocks, block_bytes), np.zeros(num_blocks * block_bytes + offset, np.uint8)[offset:].reshape(num_blocks, block_bytes)


@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize("order", ["scattered", "neighbours", "reversed", "one", "none"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("block_bytes", [1, 128, 4000, 4096, _STREAMED, _STREAMED + 64])
def test_the_named_blocks_arrive_and_no_other_is_touched(block_bytes: int, offset: int, order: str) -> None:
    source, destination = _pools(48, block_bytes, offset)
    random = np.random.default_rng(7)
    from_ids, to_ids = {
        "scattered": (random.permutation(48)[:40], random.permutation(48)[:40]),
        "neighbours": (np.arange(40), np.arange(8, 48)),
        "reversed": (np.arange(40)[::-1], np.arange(40)),
        "one": (np.array([47]), np.array([0])),
        "none": (np.array([], np.int64), np.array([], np.int64)),
    }[order]
    expected = destination.copy()
    expected[to_ids] = source[from_ids]
    assert copy_blocks(source, from_ids.tolist(), destination, to_ids.tolist(), CopyStop())
    assert (destination == expected).all()


@pytest.mark.usefixtures("copying")
def test_ids_may_be_every_other_one_of_an_array() -> None:
    source, destination = _pools(48, 128)
    copy_blocks(source, np.arange(48)[::-2], destination, np.arange(48)[::2], CopyStop())
    assert (destination[::2] == source[::-2]).all() and not destination[1::2].any()


@pytest.mark.usefixtures("copying")
def test_a_stop_in_front_copies_nothing() -> None:
    source, destination = _pools(4, 128)
    stop = CopyStop()
    stop.set()
    assert not copy_blocks(source, [0, 1], destination, [0, 1], stop)
    assert not destination.any()
    stop.clear()
    assert copy_blocks(source, [0, 1], destination, [0, 1], stop)


@pytest.mark.parametrize("block_bytes", [4000, _STREAMED])
def test_a_native_copy_ends_with_the_block_in_which_the_stop_came(block_bytes: int, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "_loaded", [build_native_copy(kernel_cache, "c++")])
    source, destination = _pools(200, block_bytes)
    stop = CopyStop()
    stop.flag = ctypes.c_int32.from_buffer(destination.data, 50 * block_bytes)  # set by the copy itself, in the middle
    ids = list(range(0, 200, 2))
    assert not copy_blocks(source, ids, destination, ids, stop)
    assert (destination[:52:2] == source[:52:2]).all()
    assert not destination[52:].any()


def test_a_numpy_copy_ends_with_the_run_in_which_the_stop_came() -> None:
    class Counting(CopyStop):
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks > 2

    source, destination = _pools(100, 128)
    ids = np.arange(100)
    assert not numpy_copy(source, ids, destination, ids, Counting())
    assert (destination[:32] == source[:32]).all() and not destination[32:].any()


@pytest.mark.usefixtures("copying")
def test_other_threads_run_while_blocks_are_copied_and_can_stop_it() -> None:
    source, destination = _pools(64, _STREAMED)
    ids = [index % 64 for index in range(1 << 21)]  # 128 GiB: nobody waits for its end
    stop = CopyStop()
    with ThreadPoolExecutor(1) as threads:
        copy = threads.submit(copy_blocks, source, ids, destination, ids, stop)
        while not destination[0].any():
            assert not copy.done()
        stop.set()
        assert copy.result(timeout=10) is False


@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize(("from_ids", "to_ids"), [([4], [0]), ([0], [4]), ([-1], [0]), ([0], [-1]), ([0, 1], [0]), ([0], []), ([1 << 40], [0])], ids=str)
def test_ids_outside_a_pool_or_without_a_place_are_refused(from_ids: list[int], to_ids: list[int]) -> None:
    source, destination = _pools(4, 128)
    with pytest.raises(ValueError, match="blocks"):
        copy_blocks(source, from_ids, destination, to_ids, CopyStop())
    assert not destination.any()


@pytest.mark.usefixtures("copying")
def test_pools_that_do_not_fit_each_other_are_refused() -> None:
    source, destination = _pools(4, 128)
    for one, other in (
        (source[:, :0].copy(), destination[:, :0].copy()),
        (source, _pools(4, 64)[1]),
        (source[:, :64], destination[:, :64]),
        (source, destination[:, ::2]),
    ):
        with pytest.raises(ValueError, match="blocks"):
            copy_blocks(one, [0], other, [0], CopyStop())
    destination.flags.writeable = False
    with pytest.raises(ValueError, match="blocks"):
        copy_blocks(source, [0], destination, [0], CopyStop())


def test_without_a_compiler_numpy_copies_and_the_log_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(block_copy, "_loaded", [])
    source, destination = _pools(4, 128)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            load_copy(tmp_path, "no-such-compiler")
            assert copy_blocks(source, [0, 1, 3], destination, [3, 2, 1], CopyStop())
    assert (destination[[3, 2, 1]] == source[[0, 1, 3]]).all()
    assert [record.message for record in caplog.records if "numpy copies blocks" in record.message] == [caplog.records[0].message]
    assert "no-such-compiler" in caplog.text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo broken >&2; exit 3", "broken"),
        ('test "$1" = --version || exit 0', "No such file"),
        ("kill -9 $$", "failed"),
        ('for last; do :; done; test "$1" = --version || : > "$last"', "too short"),
        ('for last; do :; done; test "$1" = --version || echo "int one;" | cc -shared -x c - -o "$last"', "tandem_copy_blocks"),
    ],
    ids=["fails", "writes nothing", "is killed", "writes no library", "writes another library"],
)
def test_with_a_broken_compiler_numpy_copies_and_the_advice_is_about_copies(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    _copies_by_numpy(tmp_path, str(compiler), monkeypatch, caplog)
    assert said in caplog.text and "attention" not in caplog.text


def test_a_compiler_that_cannot_be_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"\x7fELF no program")
    compiler.chmod(0o700)
    _copies_by_numpy(tmp_path, str(compiler), monkeypatch, caplog)


def test_a_compiler_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(build, "_COMPILE_TIMEOUT_S", 0.1)
    _copies_by_numpy(tmp_path, str(compiler), monkeypatch, caplog)


def test_a_cache_that_cannot_be_written_costs_the_native_copy_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").touch()
    _copies_by_numpy(tmp_path, "c++", monkeypatch, caplog)
    assert "set cache_dir" in caplog.text and "attention" not in caplog.text


def _copies_by_numpy(cache_dir: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(block_copy, "_loaded", loaded)
    with caplog.at_level(logging.WARNING):
        load_copy(cache_dir, compiler)
    assert loaded == [numpy_copy] and "numpy copies blocks" in caplog.text
    assert [path.name for path in cache_dir.glob("kernels/*")] in ([], [path.name for path in cache_dir.glob("kernels/block_copy-*.so")])


def test_processes_that_compile_at_once_all_get_a_whole_library(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from kvtransfer.block_copy import build_native_copy; build_native_copy(Path(sys.argv[1]), 'c++')"
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(list(tmp_path.glob("kernels/*"))) == 1
