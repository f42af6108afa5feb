"""A synthetic prefill instance as a child process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks.handover_bench_pool import argument_of
from engine.kv_cache import KvLayout
from kvtransfer.nixl_settings import NixlSettings

_START_S, _STOP_S = 120.0, 10.0


@dataclass(frozen=True, slots=True)
class PrefillWish:
    """What to start."""

    layout: KvLayout
    num_blocks: int
    cores: Sequence[int]
    socket_dir: Path
    confirm: bool = True
    """False: a hand-over lasts until decode goes away, and each one that was copied is told by `copied`."""
    nixl: NixlSettings = field(default_factory=NixlSettings)


class PrefillProcess:
    """The running child."""

    def __init__(self, process: asyncio.subprocess.Process, first_line: dict[str, Any]) -> None:
        self._process = process
        self.pid = process.pid
        self.address = f"127.0.0.1:{first_line['port']}"
        self.missing: dict[str, str] = first_line["missing"]
        """Why it does not offer a transport, by its name."""

    async def copied(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the next prompt that decode has copied: `request_id`, and `announced_ns` and `copied_ns` as of time.monotonic_ns()."""
        async with asyncio.timeout(timeout_s):
            return await _line(self._process)


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the synthetic prefill instance has ended; its last words are above")
    found: dict[str, Any] = json.loads(line)
    return found


@asynccontextmanager
async def running_prefill(wish: PrefillWish) -> AsyncIterator[PrefillProcess]:
    """Starts the process, waits until it serves, and ends it."""
    arguments = [
        "--layout",
        argument_of(wish.layout),
        "--num-blocks",
        str(wish.num_blocks),
        "--socket-dir",
        str(wish.socket_dir),
        "--nixl",
        argument_of(wish.nixl),
    ]
    arguments += ["--cores", *map(str, wish.cores), *([] if wish.confirm else ["--no-confirm"])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "cli.child", str(os.getpid()), "checks.handover_bench_prefill", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_START_S):
            first_line = await _line(process)
        yield PrefillProcess(process, first_line)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
