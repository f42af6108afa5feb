"""`make check-input`: every row of both tables of bad input at three real processes: its status, how long the refusal takes, and what it leaves behind."""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checks.bad_inputs import BAD_INPUTS, ODD_INPUTS
from checks.bad_peers import BAD_PEERS, open_pairing
from checks.cluster import Cluster, num_held, running_cluster
from checks.refusals import DECODE_GENERATE, MAX_LATENCY_S, BadInput, Facts, in_flight, raw_channel, send
from checks.verdict import Check, quick
from cli.stack import StackOptions
from gateway.served_model import ServedModel
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, generation_pb2, prefill_pb2

_MAX_MODEL_LEN = 1024
_MAX_GROWTH_BYTES = 8 << 20
_MAX_HEAVY_GROWTH_BYTES = 64 << 20
"""Two messages more in the allocator's hands than after the warm-up: hundreds of messages of 31 MiB end on a level, but reach it in steps of that size."""
_WARM_UPS = 3
_GOOD_S = 30.0
_SERVICES = {
    "gateway": "tandem.v1.GatewayService",
    "decode-0": "tandem.v1.DecodeService",
    "prefill-0": "tandem.v1.PrefillService",
}
_ROWS = (*(("gateway", row) for row in BAD_INPUTS), *(("decode-0" if row.path == DECODE_GENERATE else "prefill-0", row) for row in BAD_PEERS))
"""Each with the service that it is sent to."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A row's refusals."""

    row: BadInput
    latencies_s: Sequence[float]

    @property
    def median_s(self) -> float:
        """The usual refusal."""
        return statistics.median(self.latencies_s)

    @property
    def p99_s(self) -> float:
        """The slowest but one in a hundred."""
        return sorted(self.latencies_s)[max(0, round(len(self.latencies_s) * 0.99) - 1)]

    def as_dict(self) -> dict[str, object]:
        """For the report's file."""
        return {"name": self.row.name, "median_ms": round(self.median_s * 1e3, 3), "p99_ms": round(self.p99_s * 1e3, 3), "light": self.row.light}


class Table:
    """All rows at one running stack."""

    def __init__(self, check: Check, cluster: Cluster, channels: dict[str, grpc.aio.Channel], facts: Facts) -> None:
        self._check = check
        self._cluster = cluster
        self._channels = channels
        self._facts = facts

    async def round(self, door: str, row: BadInput, count: int) -> Measured:
        """Sends a row `count` times; every answer must be the row's."""
        channel = self._channels[door]
        request, latencies_s, wrong = row.make(self._facts), [], ""
        async with in_flight(channel, row, self._facts):
            for _ in range(count):
                refusal = await send(channel, row, request)
                wrong = wrong or refusal.difference(row)
                latencies_s.append(refusal.latency_s)
        self._check.goal(not wrong, f"{row.name}: {wrong}")
        return Measured(row, latencies_s)

    async def one_by_one(self, rows: Sequence[tuple[str, BadInput]], served_every: int) -> None:
        """Each once, with a look at the service afterwards, and a good request after every `served_every`-th."""
        for number, (door, row) in enumerate(rows):
            await self.round(door, row, 1)
            await self.is_serving(door, row)
            if number % served_every == 0:
                await self.answers(row)

    async def rounds(self, rows: Sequence[tuple[str, BadInput]], count: int) -> list[Measured]:
        """All of them. A light one that was slow is sent again, more often: on a busy machine five are few."""
        measured = []
        for door, row in rows:
            one = await self.round(door, row, count)
            if row.light and one.median_s >= MAX_LATENCY_S:
                one = await self.round(door, row, 4 * count)
            measured.append(one)
        return measured

    async def is_serving(self, door: str, row: BadInput) -> None:
        """The service that was asked says so."""
        health: Any = health_pb2_grpc.HealthStub(self._channels[door])
        answer = await health.Check(health_pb2.HealthCheckRequest(service=_SERVICES[door]), timeout=_GOOD_S)
        self._check.goal(answer.status == health_pb2.HealthCheckResponse.SERVING, f"{row.name}: {door} is not serving afterwards")

    async def answers(self, row: BadInput) -> None:
        """A good request is served."""
        try:
            good = await self._cluster.gateway.GenerateUnary(gateway_pb2.GenerateUnaryRequest(request=_good_request()), timeout=_GOOD_S)
        except grpc.aio.AioRpcError as error:
            self._check.goal(False, f"{row.name}: a good request afterwards ends {StatusError.of(error)}")
        else:
            self._check.goal(len(good.choices[0].token_ids) == 1, f"{row.name}: a good request afterwards has {len(good.choices[0].token_ids)} tokens")

    async def odd(self) -> None:
        """Control tokens in what a user says stay text."""
        for row in ODD_INPUTS:
            expected = await self._num_control_tokens(row.build("harmless"))
            for text in list(self._facts.control_tokens)[: 3 if quick() else None]:
                found = await self._num_control_tokens(row.build(f"a {text} b"))
                self._check.goal(found == expected, f"{row.name}: {text} makes {found - expected} control tokens")

    async def _num_control_tokens(self, request: gateway_pb2.GenerateRequest) -> int:
        answer = await self._cluster.gateway.GenerateUnary(gateway_pb2.GenerateUnaryRequest(request=request), timeout=_GOOD_S)
        controls = set(self._facts.control_tokens.values())
        return sum(token_id in controls for token_id in answer.prompt_token_ids)

    async def nothing_held(self) -> None:
        """In neither pool."""
        for name, report in (await self._cluster.memory()).items():
            self._check.goal(num_held(report) == 0, f"{name} holds {num_held(report)} things")


def _good_request() -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(text="Once upon a time", sampling_params=generation_pb2.SamplingParams(max_tokens=1, temperature=0.0))


def resident_bytes(pid: int) -> int:
    """VmRSS of a process."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


async def _facts(cluster: Cluster, model: Path) -> Facts:
    served = ServedModel.load(model, max_model_len=_MAX_MODEL_LEN)
    served.tokenizer.close()
    control = {token.content: token_id for token_id, token in served.tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    watch = cluster.prefill.WatchLoad(prefill_pb2.PrefillServiceWatchLoadRequest(), timeout=_GOOD_S)
    try:
        load = (await watch.read()).load
    finally:
        watch.cancel()
    return Facts(served.name, served.vocab_size, _MAX_MODEL_LEN, served.longest_token_chars, load.layout, control_tokens=control)


@asynccontextmanager
async def _running_table(check: Check, model: Path) -> AsyncIterator[tuple[Table, Mapping[str, int]]]:
    """The table at a stack of three, and the services' processes."""
    worker = f"--max-model-len={_MAX_MODEL_LEN} --num-threads=1 --kv-cache-memory=256MiB"
    options = StackOptions(model, prefill_args=worker, decode_args=worker, gateway_args=f"--max-model-len={_MAX_MODEL_LEN}")
    async with running_cluster(options, Path("out/check-input.log")) as cluster, AsyncExitStack() as opened:
        channels = {name: await opened.enter_async_context(raw_channel(address)) for name, address in cluster.stack.addresses.items()}
        facts = await _facts(cluster, model)
        pairing_id = await opened.enter_async_context(open_pairing(cluster.prefill, facts))
        yield Table(check, cluster, channels, replace(facts, pairing_id=pairing_id)), cluster.stack.pids


async def run(check: Check, model: Path) -> tuple[list[Measured], dict[str, int]]:
    """Returns all rows, and by how many bytes each service has grown under light ones and the gateway under messages of many megabytes."""
    count, served_every = (5, 8) if quick() else (50, 1)
    async with _running_table(check, model) as (table, pids):
        light = [each for each in _ROWS if each[1].light]
        heavy = [each for each in _ROWS if not each[1].light]
        await table.one_by_one(light, served_every)
        await table.odd()
        sizes: dict[str, list[int]] = {name: [] for name in pids}
        for _ in range(_WARM_UPS):
            await table.rounds(light, 2)
            for name, pid in pids.items():
                sizes[name].append(resident_bytes(pid))
        warm = {name: int(statistics.median(found)) for name, found in sizes.items()}
        measured = await table.rounds(light, count)
        growth = {name: resident_bytes(pid) - warm[name] for name, pid in pids.items()}
        await table.one_by_one(heavy, 1)
        await table.rounds(heavy, max(_WARM_UPS, count // 2))
        warm_heavy = resident_bytes(pids["gateway"])
        measured += await table.rounds(heavy, count)
        growth["heavy"] = resident_bytes(pids["gateway"]) - warm_heavy
        await table.nothing_held()
    check.details |= {"warm_bytes": warm, "growth_bytes": growth}
    for name, size in growth.items():
        check.goal(size < (_MAX_HEAVY_GROWTH_BYTES if name == "heavy" else _MAX_GROWTH_BYTES), f"{name} has grown by {size / (1 << 20):.1f} MiB")
    return measured, growth


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    model = parser.parse_args().model
    check = Check("check-input")
    check.begin(f"{len(_ROWS)} kinds of bad input at three processes", seconds=150, quick_seconds=45)
    measured, growth = asyncio.run(run(check, model))
    light = [one for one in measured if one.row.light]
    for one in light:
        check.goal(one.median_s < MAX_LATENCY_S, f"{one.row.name}: refused in {one.median_s * 1e3:.1f} ms (median)")
    check.details["measured"] = [one.as_dict() for one in measured]
    check.end(
        {
            "rows": len(measured),
            "median_ms": round(statistics.median(one.median_s for one in light) * 1e3, 2),
            "max_median_ms": round(max(one.median_s for one in light) * 1e3, 2),
            "max_p99_ms": round(max(one.p99_s for one in light) * 1e3, 2),
            "rss_growth_mib": round(growth["gateway"] / (1 << 20), 2),
            "heavy_growth_mib": round(growth["heavy"] / (1 << 20), 2),
        }
    )


if __name__ == "__main__":
    main()
