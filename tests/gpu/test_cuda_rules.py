"""The rules of tests/kvtransfer/test_cuda_rules.py, held against CUDA itself: two processes on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from checks.cuda_peer import Peer
from checks.cuda_rules import KILLING_RULES, RULES, Rule, TwoProcesses
from checks.gpu import missing

_REASON = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_REASON), reason=f"no GPU: {_REASON}")]


@contextmanager
def _two_processes() -> Iterator[TwoProcesses]:
    with ExitStack() as stack:
        exporter, importer, observer = (Peer(name, "checks.cuda_work:on_gpu") for name in ("exporter", "importer", "observer"))
        for peer in (exporter, importer, observer):
            stack.callback(peer.close)
        yield TwoProcesses(exporter.runtime, importer.runtime, exporter.kill, importer.kill, lambda: int(observer.call("free_bytes")), 4 << 30)


@pytest.fixture(scope="module")
def two() -> Iterator[TwoProcesses]:
    with _two_processes() as processes:
        yield processes


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_cuda_keeps(rule: Rule, two: TwoProcesses) -> None:
    rule(two)


@pytest.mark.parametrize("rule", KILLING_RULES, ids=lambda rule: rule.__name__)
def test_cuda_keeps_when_a_process_is_killed(rule: Rule) -> None:
    with _two_processes() as processes:
        rule(processes)
