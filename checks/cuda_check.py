"""What gpu-check does once there is a GPU: rules, content, speed, overlap, latency."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from checks.cuda_peer import Peer, PeerFailedError
from checks.cuda_rules import KILLING_RULES, RULES, Rule, RuleBrokenError, TwoProcesses
from checks.verdict import Check
from kvtransfer import xxh3
from kvtransfer.cuda_runtime import CudaError

_DEFAULT_CTAS = 32
_CTAS = (8, 16, _DEFAULT_CTAS, 132, 528)
_MIN_OF_MEMCPY = 0.7
_MAX_SLOW_DOWN = 0.10


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of it."""

    pool_bytes: int
    run_bytes: int
    """A quarter of the pool: what is copied at once."""
    large_bytes: int
    """See TwoProcesses."""
    rounds: int


FULL, QUICK = Sizes(2 << 30, 512 << 20, 4 << 30, 40), Sizes(1 << 30, 256 << 20, 4 << 30, 8)


class GpuCheck:
    """One run. `new_peer` starts a process; in a dry run without a GPU, something that answers like one."""

    def __init__(self, check: Check, sizes: Sizes, new_peer: Callable[[str], Peer]) -> None:
        self.check = check
        self.values: dict[str, int | float | str] = {}
        self._sizes = sizes
        self._new_peer = new_peer

    @contextmanager
    def _peers(self, *names: str) -> Iterator[list[Peer]]:
        peers: list[Peer] = []
        try:
            peers.extend(self._new_peer(name) for name in names)  # all start at once, and answer when they are up
            yield peers
        finally:
            for peer in peers:
                peer.close()

    def run(self) -> None:
        """All of it."""
        self._rules()
        with self._peers("prefill", "decode") as (prefill, decode):
            environment = decode.call("environment")
            self.check.details["environment"] = environment
            print("  " + ", ".join(f"{name} {value}" for name, value in environment.items()), flush=True)
            memcpy = decode.call("memcpy_speed", self._sizes.run_bytes, self._sizes.rounds)
            self.values["memcpy_gbps"] = round(memcpy / 1e9, 1)
            for block_bytes, name in ((8 << 10, "8k"), (64 << 10, "64k"), (2 << 20, "2m")):
                self._blocks(prefill, decode, block_bytes, name, memcpy)

    def _rules(self) -> None:
        facts: dict[str, object] = {}
        broken: list[str] = []
        for rules in (RULES, *([rule] for rule in KILLING_RULES)):
            with self._peers("exporter", "importer", "observer") as (exporter, importer, observer):
                two = _two(exporter, importer, observer, self._sizes.large_bytes)
                for rule in rules:
                    broken.extend(_break(rule, two))
                facts |= two.facts
        num_rules = len(RULES) + len(KILLING_RULES)
        self.values["rules"] = f"{num_rules - len(broken)}/{num_rules}"
        self.check.details["facts"], self.check.details["broken_rules"] = facts, broken
        for name, fact in facts.items():
            print(f"  {name}: {fact}", flush=True)
        self.check.goal(not broken, f"rules of CUDA that do not hold: {'; '.join(broken)}")

    def _blocks(self, prefill: Peer, decode: Peer, block_bytes: int, name: str, memcpy: float) -> None:
        payload, fds = prefill.call_for_fds("make_pool", block_bytes, self._sizes.pool_bytes, block_bytes)
        num_blocks = self._sizes.run_bytes // block_bytes
        open_s = decode.call("open_pool", payload, num_blocks, fds=fds)
        for fd in fds:
            os.close(fd)
        try:
            self._content(prefill, decode, num_blocks, name)
            speeds = {ctas: decode.call("gather_speed", num_blocks, self._sizes.rounds, ctas) for ctas in _CTAS}
            best = max(speeds.values(), key=lambda speed: float(speed["bytes_per_s"]))["bytes_per_s"]
            decode.call("set_max_ctas", _DEFAULT_CTAS)
            latencies = sorted(decode.call("latencies", max((1 << 20) // block_bytes, 1), 5 * self._sizes.rounds))
            self.values[f"gather_{name}_gbps"] = round(best / 1e9, 1)
            self.values[f"gather_{name}_default_gbps"] = round(speeds[_DEFAULT_CTAS]["bytes_per_s"] / 1e9, 1)
            self.values[f"submit_{name}_us"] = round(1e6 * speeds[_DEFAULT_CTAS]["submit_s"], 1)
            self.values[f"small_{name}_us"] = round(1e6 * statistics.median(latencies), 1)
            self.check.details[f"gather_{name}"] = {"open_s": open_s, "by_ctas": speeds, "small_s": latencies}
            if name == "64k":
                self.check.goal(best >= _MIN_OF_MEMCPY * memcpy, f"a gather of 64 KiB blocks at least {_MIN_OF_MEMCPY} of a memcpy, got {best / memcpy:.2f}")
                self._overlap(decode, num_blocks)
        finally:
            decode.call("close_pool")

    def _content(self, prefill: Peer, decode: Peer, num_blocks: int, name: str) -> None:
        """All of a run against prefill's own digests, two blocks of them against digests made on the host, and a stale block."""
        ids, to_ids = [5 * index % (4 * num_blocks) for index in range(num_blocks)], list(reversed(range(num_blocks)))
        decode.call("read", ids, to_ids)
        due = prefill.call("pool_digests", ids)
        same = decode.call("landing_digests", to_ids) == due and len(set(due)) == num_blocks
        for index in (0, num_blocks - 1):
            block = np.frombuffer(prefill.call("pool_block", ids[index]), np.uint8).reshape(1, -1)
            same = same and xxh3.finish(xxh3.accumulators(block)[0].tolist(), block.size) == due[index]
        self.check.goal(same, f"the bytes of {name} blocks as they left")
        prefill.call("set_generation", ids[0], 3)
        try:
            decode.call("read", ids[:1], to_ids[:1])
            stale = False
        except PeerFailedError as error:
            stale = "StaleBlockError" in str(error)
        self.check.goal(stale, "a block of another generation is refused")
        prefill.call("set_generation", ids[0], 1)

    def _overlap(self, decode: Peer, num_blocks: int) -> None:
        found = {ctas: decode.call("slow_down", num_blocks, ctas, max(self._sizes.rounds // 4, 3)) for ctas in _CTAS}
        self.check.details["overlap"] = found
        slow_down = found[_DEFAULT_CTAS]["slow_down"]
        self.values["slow_down"] = round(slow_down, 3)
        self.check.goal(slow_down <= _MAX_SLOW_DOWN, f"matrix products beside a gather at most {_MAX_SLOW_DOWN:.0%} slower, got {slow_down:.0%}")


def _two(exporter: Peer, importer: Peer, observer: Peer, large_bytes: int) -> TwoProcesses:
    return TwoProcesses(exporter.runtime, importer.runtime, exporter.kill, importer.kill, lambda: int(observer.call("free_bytes")), large_bytes)


def _break(rule: Rule, two: TwoProcesses) -> list[str]:
    """What is wrong with a rule; nothing when it holds."""
    try:
        rule(two)
    except (RuleBrokenError, CudaError, PeerFailedError) as error:
        return [f"{rule.__name__} ({error})"]
    return []
