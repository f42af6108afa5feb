"""What the flags of `tandem bench` mean."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cost import Price
from bench.flags import DEFAULT_TARGET, UsageError
from bench.goodput import Limits, parse_limits
from bench.openai_target import Endpoint
from bench.runner import RunLimits

_MILLISECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Whom to ask, and how."""

    backend: str
    """tandem or openai."""
    address: str
    """host:port, or a URL."""
    model: str
    endpoint: Endpoint
    tokenizer: Path | None
    """Folder with tokenizer.json: prompts go out as text."""
    ignore_eos: bool
    continuous_usage: bool
    temperature: float
    headers: dict[str, str]
    extra_body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is sent. One of rate, trace and concurrency says when."""

    workload: str
    num_prompts: int | None
    duration_s: float | None
    request_rate: float | None
    burstiness: float
    trace_speed: float | None
    """The workload's own arrival times, so many times as fast."""
    concurrency: int | None
    num_warm_up: int | None
    """None: as many as a run of its kind needs."""
    seed: int
    scale: float
    input_len: str
    output_len: str
    vocab_size: int | None
    literal: bool


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is made of it."""

    directory: Path
    label: str
    limits: tuple[Limits, ...]
    price: Price | None
    report: bool
    quiet: bool
    model_dir: Path | None
    cores: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Of a sweep."""

    min_per_s: float
    max_per_s: float
    start_per_s: float
    width: float
    min_attainment: float
    max_probes: int


def server_options(given: argparse.Namespace) -> ServerOptions:
    """Raises UsageError."""
    if given.base_url and given.target:
        raise UsageError("--target and --base-url name two servers: give one")
    backend = given.backend or ("openai" if given.base_url else "tandem")
    chat = given.endpoint == Endpoint.CHAT or backend == "openai-chat"
    if backend == "tandem":
        if given.base_url or chat or given.header or given.extra_body != "{}" or given.tokenizer:
            raise UsageError("--base-url, --endpoint chat, --tokenizer, --header and --extra-body are for OpenAI-compatible servers: --backend openai")
        address = given.target or os.environ.get("TANDEM_GATEWAY") or DEFAULT_TARGET
    else:
        if not given.base_url:
            raise UsageError(f"--backend {backend} needs --base-url")
        if not given.base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must begin with http:// or https://, got {given.base_url!r}")
        address = given.base_url
    return ServerOptions(
        "tandem" if backend == "tandem" else "openai",
        address,
        given.model,
        Endpoint.CHAT if chat else Endpoint.COMPLETIONS,
        given.tokenizer,
        not given.no_ignore_eos,
        not given.no_continuous_usage,
        given.temperature,
        _headers(given.header),
        _object("--extra-body", given.extra_body),
    )


def load_options(given: argparse.Namespace) -> LoadOptions:
    """Raises UsageError. A sweep's rate is set for each probe."""
    return LoadOptions(
        given.workload,
        given.num_prompts,
        given.duration,
        getattr(given, "request_rate", None),
        given.burstiness,
        getattr(given, "trace", None),
        getattr(given, "max_concurrency", None),
        given.num_warmups,
        given.seed,
        given.scale,
        given.input_len,
        given.output_len,
        given.vocab_size,
        given.literal,
    )


def output_options(given: argparse.Namespace) -> OutputOptions:
    """Raises UsageError."""
    return OutputOptions(
        given.output,
        given.label,
        limits_of(given),
        price_of(given),
        not given.no_report,
        given.quiet,
        given.model_dir,
        dict(_pair("--cores", each) for each in given.cores),
        tuple(given.note),
    )


def search_options(given: argparse.Namespace) -> SearchOptions:
    return SearchOptions(given.min_rate, given.max_rate, given.start_rate, given.width, given.attainment, given.max_probes)


def run_limits(given: argparse.Namespace, limits: Sequence[Limits]) -> RunLimits:
    """The strictest limit on TTFT goes along: it says how late the generator may be."""
    ttft = min((each.ttft_s for each in limits if each.ttft_s is not None), default=None)
    run_s = given.max_run_time
    if getattr(given, "max_concurrency", None) is not None and given.duration is not None:
        run_s = min(run_s, given.duration)
    return RunLimits(given.request_timeout, run_s, given.drain_timeout, ttft_limit_s=ttft)


def limits_of(given: argparse.Namespace) -> tuple[Limits, ...]:
    """`ttft:500 tpot:50` in milliseconds, as vllm has it. Raises UsageError."""
    texts = [",".join(_limit(part) for part in parts) for parts in given.goodput]
    try:
        return parse_limits(texts)
    except ValueError as error:
        raise UsageError(f"--goodput: {error}") from None


def price_of(given: argparse.Namespace) -> Price | None:
    """Raises UsageError."""
    try:
        return None if given.price is None else Price(given.price, given.num_devices, given.currency)
    except ValueError as error:
        raise UsageError(f"--price: {error}") from None


def _limit(part: str) -> str:
    name, colon, value = part.partition(":")
    name = {"e2el": "e2e"}.get(name, name)
    try:
        return f"{name}={float(value) * _MILLISECONDS}"
    except ValueError:
        raise UsageError(f"--goodput: {part!r} is no limit such as ttft:500 in milliseconds" + ("" if colon else ", it has no colon")) from None


def _headers(given: Sequence[str]) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return ({"Authorization": f"Bearer {key}"} if key else {}) | dict(_pair("--header", each) for each in given)


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"{flag}: {text!r} is no NAME=VALUE")
    return name, value


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{flag} must be a JSON object, got {text}")
    return found
