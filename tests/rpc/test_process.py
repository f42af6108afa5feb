from __future__ import annotations

import gc
import platform

import pytest

from rpc.process import freeze_heap, keep_freed_memory


def test_memory_is_kept_on_glibc_and_nothing_is_done_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False


def test_frozen_heap_is_out_of_the_collectors_sight() -> None:
    try:
        freeze_heap()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
