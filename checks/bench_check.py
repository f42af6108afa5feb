"""`make check-bench`: the load generator against a server whose delays are known. Open and closed loop, gRPC and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from bench.arrivals import Arrivals, Closed, Poisson
from bench.metrics import summarize
from checks.bench_delays import Kind
from checks.bench_load import KnownServer, Load, Loaded, Slow, known_server
from checks.bench_machine import MAX_OTHERS, until_quiet
from checks.bench_truth import Held, hold, pairs
from checks.verdict import Check, quick

_RATE_PER_S, _CONCURRENCY = 25.0, 8
_OPEN, _CLOSED = Poisson(_RATE_PER_S), Closed(_CONCURRENCY)
_WARM_UP_SLOWER_S = 0.25
_STALL_AFTER_S, _STALL_S = 1.5, 2.0
_FELT_S = 0.5
"""Nothing but the stall takes as long to a first token."""
_ATTEMPTS, _LULL_S = 4, 10.0

Judge = Callable[[Loaded, Held], Iterator[str]]


@dataclass
class Tally:
    """What all cases found."""

    runs: int = 0
    requests: int = 0
    tokens: int = 0
    worst_s: float = 0.0
    apart_s: list[float] = field(default_factory=list)
    repeated: int = 0

    def add(self, loaded: Loaded, held: Held) -> None:
        self.runs += 1
        self.requests += len(loaded.run.records)
        self.tokens += sum(record.num_output_tokens for record in loaded.run.records)
        self.worst_s = max(self.worst_s, held.worst_s)
        self.apart_s.append(held.apart_s)


class Bench:
    """The cases, one after the other."""

    def __init__(self, check: Check, server: KnownServer) -> None:
        self._check = check
        self._server = server
        self.tally = Tally()

    async def hold(self, name: str, load: Load, judge: Judge) -> Loaded:
        """A run must be true and not void. What is off counts only where the machine left us alone: else it is run again, and at last the check is VOID."""
        for _ in range(_ATTEMPTS):
            loaded = await self._server.load(load)
            held = hold(loaded)
            missed = [*(f"void: {reason}" for reason in loaded.run.void), *held.wrong, *judge(loaded, held)]
            if not missed or loaded.busy.is_quiet:
                break
            self.tally.repeated += 1
            print(f"  {name}: once more, {loaded.busy}: {missed[0]}", flush=True)
            await until_quiet(_LULL_S)
        else:
            self._check.details["misses on a busy machine"] = {name: missed}
            self._check.void(f"{name}: {len(missed)} figures are off, and the machine was too busy to say why: {loaded.busy}")
        self.tally.add(loaded, held)
        line = f"{len(loaded.run.records)} requests, furthest off {held.worst_s * 1e3:.2f} ms, a token is seen {held.apart_s * 1e3:.2f} ms after it is sent"
        print(f"  {name}: {line}", flush=True)
        self._check.details[name] = {"worst_ms": held.worst_s * 1e3, "apart_ms": held.apart_s * 1e3, "busy": str(loaded.busy), "missed": missed}
        for text in missed:
            self._check.goal(False, f"{name}: {text}")
        return loaded

    async def void(self, name: str, load: Load, words: str) -> None:
        """A slow generator's run must be void, for the right reason. Beside others' load a burner gets less of a core than it wants."""
        for _ in range(_ATTEMPTS):
            loaded = await self._server.load(load)
            reasons = "; ".join(loaded.run.void)
            if words in reasons or loaded.busy.others <= MAX_OTHERS:
                break
            self.tally.repeated += 1
            print(f"  {name}: once more, {loaded.busy}", flush=True)
            await until_quiet(_LULL_S)
        else:
            self._check.void(f"{name}: the run is not void, and the machine was too busy for anything to be slow by its own fault: {loaded.busy}")
        print(f"  {name}: {'VOID: ' + reasons if reasons else 'not void'}", flush=True)
        self._check.details[name] = {"void": loaded.run.void}
        self._check.goal(words in reasons, f"{name}: the run is not void for that it {words}: {reasons or 'it is not void'}")


def delays(loaded: Loaded, held: Held) -> Iterator[str]:
    """The warm-up was slow and is in no figure; the cold start was too, and stands apart."""
    if loaded.load.slow_first_s:
        warm_up = [record for record in loaded.run.records if record.warm_up]
        if len(warm_up) != loaded.load.num_warm_up:
            yield f"{len(warm_up)} requests are marked as warm-up instead of {loaded.load.num_warm_up}"
        if not loaded.run.cold_start["ttft_s"] >= _WARM_UP_SLOWER_S:
            yield f"the cold start took {loaded.run.cold_start['ttft_s']:.3f} s, and was delayed by {_WARM_UP_SLOWER_S} s"


def stalled_open(loaded: Loaded, held: Held) -> Iterator[str]:
    """Every request that was due in the stall has waited to its end at least, by the generator's own record."""
    begin_s, end_s = (each - loaded.start_s for each in loaded.stall)
    due = [record for record in loaded.run.records if not record.warm_up and record.due_s is not None and begin_s <= record.due_s < end_s]
    if not len(due) >= _RATE_PER_S * _STALL_S / 2:
        yield f"only {len(due)} requests were due in the stall"
    hidden = [record.index for record in due if record.first_token_s is None or record.first_token_s - record.scheduled_s < end_s - record.scheduled_s]
    if hidden:
        yield f"{len(hidden)} of {len(due)} requests that were due in the stall look quicker than it was long"
    p90_s = summarize(loaded.run).ttft.percentile(90).value
    if not p90_s > _FELT_S:
        yield f"p90 of TTFT is {p90_s * 1e3:.0f} ms: the stall does not show"


def stalled_closed(loaded: Loaded, held: Held) -> Iterator[str]:
    """The control: a closed loop waits with the server, so only those feel it that were out."""
    felt = sum(pair.ttft_s > _FELT_S for pair in pairs(loaded))
    if not 1 <= felt <= _CONCURRENCY:
        yield f"{felt} requests of a closed loop felt the stall, {_CONCURRENCY} were out"
    p90_s = summarize(loaded.run).ttft.percentile(90).value
    if not p90_s < _FELT_S:
        yield f"p90 of a closed loop's TTFT is {p90_s * 1e3:.0f} ms: it should hide the stall"


def faulty(loaded: Loaded, held: Held) -> Iterator[str]:
    """Every kind of fault was met."""
    met = {pair.served.kind for pair in pairs(loaded)}
    if len(met) != len(Kind):
        yield f"only {len(met)} kinds of answers were met"


def _loads(arrivals: Arrivals, num_requests: int) -> Iterator[tuple[str, Load]]:
    loop = "closed" if isinstance(arrivals, Closed) else "open"
    for protocol in ("grpc", "http"):
        yield f"{loop} loop over {protocol}", Load(protocol, arrivals, num_requests)


async def run(check: Check) -> Tally:
    """All cases against one server."""
    async with known_server() as server:
        bench = Bench(check, server)
        count = 60 if quick() else 250
        for arrivals in (_OPEN, _CLOSED):
            for name, load in _loads(arrivals, count):
                await bench.hold(name, replace(load, slow_first_s=_WARM_UP_SLOWER_S), delays)
            for name, load in [] if quick() and arrivals is _CLOSED else _loads(arrivals, 75 if quick() else 200):
                await bench.hold(f"{name}, with faults", replace(load, faults=True), faulty)
        shown = await _stalls(bench, check)
        slow_count = 50 if quick() else 150
        await bench.void("blocked event loop over grpc", Load("grpc", _OPEN, slow_count, slow=Slow.BLOCKED_LOOP), "lagged")
        await bench.void("CPU burner over http", Load("http", _OPEN, slow_count, slow=Slow.BURNER), "was busy")
        if not quick():
            await bench.void("CPU burner in a closed loop", Load("grpc", _CLOSED, slow_count, slow=Slow.BURNER), "was busy")
        check.details["stall"] = shown
        return bench.tally


async def _stalls(bench: Bench, check: Check) -> dict[str, float]:
    """The same stall in both loops: what each one's p90 of TTFT makes of it, in ms."""
    found = {}
    for protocol in ("grpc",) if quick() else ("grpc", "http"):
        for loop, arrivals, judge in (("open", _OPEN, stalled_open), ("closed", _CLOSED, stalled_closed)):
            load = Load(protocol, arrivals, 110 if quick() else 200, stall_after_s=_STALL_AFTER_S, stall_s=_STALL_S)
            loaded = await bench.hold(f"{loop} loop over {protocol}, server stalls {_STALL_S:g} s", load, judge)
            found[f"{protocol} {loop} ttft_p90_ms"] = round(summarize(loaded.run).ttft.percentile(90).value * 1e3, 1)
    return found


def main() -> None:
    """Runs the check."""
    check = Check("check-bench")
    check.begin("the load generator against a server with known delays, faults and stalls, and slow generators", seconds=130, quick_seconds=46)
    tally = asyncio.run(run(check))
    stall = check.details["stall"]
    assert isinstance(stall, dict)
    check.end(
        {
            "runs": tally.runs,
            "requests": tally.requests,
            "tokens": tally.tokens,
            "furthest_off_ms": round(tally.worst_s * 1e3, 2),
            "seen_after_ms": round(float(np.median(tally.apart_s)) * 1e3, 2),
            "stall_open_p90_ms": stall["grpc open ttft_p90_ms"],
            "stall_closed_p90_ms": stall["grpc closed ttft_p90_ms"],
            "repeated": tally.repeated,
        }
    )


if __name__ == "__main__":
    main()
