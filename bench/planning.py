"""The plan that flags, model and server make together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arrivals import Arrivals, Closed, TraceTimes, at_rate
from bench.flags import UsageError
from bench.options import LoadOptions
from bench.plan import Plan
from bench.prompts import Vocabulary
from bench.schedule import Extent, Fit, plan_of
from bench.trace_files import TraceFileError
from bench.workloads import WorkloadError, workload_of

_DEFAULT_PROMPTS = 100
_DEFAULT_WARM_UP = 10
_DEFAULT_PROBE_S = 60.0


class Planner:
    """Plans of one workload. `model_dir` has a config.json, and a tokenizer.json whose special tokens are kept out of prompts. Raises UsageError."""

    def __init__(self, load: LoadOptions, model_dir: Path | None = None) -> None:
        self._load = load
        self._model_dir = model_dir
        try:
            self._workload = workload_of(load.workload, input_len=load.input_len, output_len=load.output_len, literal=load.literal)
        except (WorkloadError, TraceFileError) as error:
            raise UsageError(f"--workload: {error}") from None

    def plan(self, described: Mapping[str, str]) -> Plan:
        """Of a run; `described`: what the server says of itself. Raises UsageError."""
        load = self._load
        warm_up = max(_DEFAULT_WARM_UP, load.concurrency or 0) if load.num_warm_up is None else load.num_warm_up
        extent = Extent(load.num_prompts, None if load.concurrency is not None else load.duration_s, warm_up)
        if load.concurrency is not None:
            if load.duration_s is not None and load.num_prompts is None:
                raise UsageError("a closed loop sends as many as are answered: with --duration give --num-prompts as the most that it may be")
            arrivals: Arrivals = Closed(load.concurrency)
        elif load.trace_speed is not None:
            arrivals = TraceTimes(load.trace_speed)
        else:
            arrivals = self._at_rate(load.request_rate or math.nan)
        if extent.num_requests is None and extent.duration_s is None:
            whole = max(self._workload.num_timed_rows - warm_up, 1) if isinstance(arrivals, TraceTimes) else _DEFAULT_PROMPTS
            extent = replace(extent, num_requests=whole)
        return self._plan(arrivals, extent, described, load.seed)

    def probe(self, described: Mapping[str, str], rate_per_s: float, number: int) -> Plan:
        """Of a sweep's probe, counted from 1: each has arrivals and prompts of its own, and the first one alone has the server's warm-up. Raises UsageError."""
        load = self._load
        warm_up = (_DEFAULT_WARM_UP if number == 1 else 0) if load.num_warm_up is None else load.num_warm_up
        duration_s = _DEFAULT_PROBE_S if load.num_prompts is None and load.duration_s is None else load.duration_s
        return self._plan(self._at_rate(rate_per_s), Extent(load.num_prompts, duration_s, warm_up), described, load.seed + number)

    def _at_rate(self, rate_per_s: float) -> Arrivals:
        try:
            return at_rate(rate_per_s, self._load.burstiness)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _plan(self, arrivals: Arrivals, extent: Extent, described: Mapping[str, str], seed: int) -> Plan:
        told = described.get("max_model_len", "")
        try:
            fit = Fit(self._vocabulary(described), self._load.scale, int(told) if told.isdecimal() and int(told) else None)
            plan = plan_of(self._workload, arrivals, extent, fit, seed)
        except (WorkloadError, ValueError) as error:
            raise UsageError(str(error)) from None
        if not any(not request.warm_up for request in plan.requests):
            raise UsageError(f"{plan.arrivals} gives no request behind the {extent.num_warm_up} of the warm-up: give more time, or a smaller --num-warmups")
        return plan

    def _vocabulary(self, described: Mapping[str, str]) -> Vocabulary:
        avoid = _special_tokens(self._model_dir)
        size = self._load.vocab_size or _configured_size(self._model_dir) or int(described.get("vocab_size") or 0)
        if not size:
            raise UsageError("the server does not tell its vocabulary: give --vocab-size, or --model-dir")
        return Vocabulary(size, avoid)


def _configured_size(model_dir: Path | None) -> int:
    if model_dir is None:
        return 0
    config = _read(model_dir / "config.json")
    found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return found if isinstance(found, int) else 0


def _special_tokens(model_dir: Path | None) -> frozenset[int]:
    path = None if model_dir is None else model_dir / "tokenizer.json"
    if path is None or not path.is_file():
        return frozenset()
    added = _read(path).get("added_tokens") or ()
    return frozenset(int(token["id"]) for token in added if isinstance(token, dict) and "id" in token)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--model-dir: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--model-dir: {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--model-dir: {path} holds no object")
    return found
