"""`tandem demo`: four prompts at once through three services on this machine, their measurements, and one request's trace."""

from __future__ import annotations

import asyncio
import os
import textwrap
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live

from cli.demo_view import Answer, LiveAnswers, summary_table
from cli.errors import UserError
from cli.generation import Generation, gateway_client, told
from cli.report import Report, Verdict
from cli.stack import Stack, StackOptions
from cli.waterfall import waterfall
from tandem_client import AsyncClient, Options, TandemError
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from telemetry.spans import REQUEST_ID

_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain to a ten-year-old why the sky is blue and why sunsets are red.",
    "Summarize in two sentences: The steam engine turned heat into motion. Coal heated water in a boiler, steam pushed a piston, and the piston "
    "turned a wheel. First it pumped water out of mines, then it drove looms and mills, and at last it moved ships and trains. Towns grew where "
    "coal was near, people left the fields for factories, and goods that had been made by hand in weeks were made in hours. Distances shrank, "
    "clocks were set to railway time, and within one lifetime a country of villages had become a country of cities.",
)
_START_S, _ANSWER_S, _DRAIN_S = 120.0, 120.0, 20.0
_KEPT_LOG_LINES = 2000


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo can be told."""

    stack: StackOptions
    target: str
    short: bool
    output: Path


@dataclass(frozen=True, slots=True)
class _Run:
    """What is known when everything has stopped."""

    answers: Sequence[Answer]
    spans: tuple[ReceivedSpan, ...]
    start_s: float
    wall_s: float
    problems: list[str]


class _ServiceLog:
    """Keeps the services' log lines out of the picture, and their last lines for when something fails."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LOG_LINES)

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(f"{name:<10}| {line}")


async def demo(options: DemoOptions, console: Console) -> int:
    """Returns the exit code: 0 when every prompt was answered and at least one KV cache was handed over. Raises UserError when nothing could start."""
    length = "20" if options.short else "30"
    console.print(
        f"{options.target}: about {length} seconds: starts prefill, decode and gateway, sends {len(_PROMPTS)} prompts at once, stops them",
        highlight=False,
        soft_wrap=True,
    )
    log = _ServiceLog()
    try:
        async with OtlpReceiver() as receiver:
            run = await _run(options, receiver, log, console)
    finally:
        options.output.mkdir(parents=True, exist_ok=True)
        log_path = options.output / f"{options.target}.log"
        log_path.write_text("".join(f"{line}\n" for line in log.lines))
    report = _report(options, run)
    _print_run(run, console)
    if report.verdict is not Verdict.OK:
        _print_log(log, log_path, console)
    console.print(f"measurements in {report.write(options.output)}, the services' log in {log_path}", style="dim", highlight=False)
    console.print(report.line(), soft_wrap=True, highlight=False, style="bold green" if report.verdict is Verdict.OK else "bold red")
    return report.verdict.value


async def _run(options: DemoOptions, receiver: OtlpReceiver, log: _ServiceLog, console: Console) -> _Run:
    stack = Stack(_with_tracing(options.stack, receiver.endpoint), log)
    started, problems = time.monotonic(), []
    try:
        with console.status("loading the model in both pools"):  # shows nothing but on a terminal
            await stack.start()
            await stack.wait_until_ready(_START_S)
        ready = time.monotonic()
        console.print(f"ready after {ready - started:.1f} s: {', '.join(stack.addresses)}", style="dim", highlight=False)
        answers = _answers(options)
        await _ask_all(stack, answers, console)
        asked = time.monotonic()
    except UserError:
        for line in list(log.lines)[-20:]:
            console.print(line, style="dim", markup=False, highlight=False)
        raise
    finally:
        # Shutting down flushes the spans, so the trace is whole when all have ended.
        problems += [f"{exit_} when it was stopped" for exit_ in await stack.drain(_DRAIN_S)]
    return _Run(answers, receiver.spans, ready - started, asked - ready, problems)


def _with_tracing(options: StackOptions, endpoint: str) -> StackOptions:
    tracing = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        "OTEL_SDK_DISABLED": "false",
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
    }
    others = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_TRACES_EXPORTER")
    cleared = {name: "" for name in others if name in os.environ}
    return replace(options, environment={**options.environment, **tracing, **cleared})


def _answers(options: DemoOptions) -> list[Answer]:
    given: Options = {"temperature": 0.0, "max_tokens": 24 if options.short else 96, "timeout_s": _ANSWER_S}
    return [
        Answer(prompt, Generation([{"role": "user", "content": prompt}], {**given, "request_id": f"demo-{i}-{uuid.uuid4().hex[:8]}"}))
        for i, prompt in enumerate(_PROMPTS, 1)
    ]


async def _ask_all(stack: Stack, answers: Sequence[Answer], console: Console) -> None:
    """Sends all prompts at once. A service that dies in the middle ends its requests with a status; nothing here waits for it."""
    async with gateway_client(stack.gateway_address) as client:
        asking = [asyncio.create_task(_ask(answer, client, stack.gateway_address)) for answer in answers]
        if console.is_terminal:
            with Live(LiveAnswers(answers), console=console, refresh_per_second=12, vertical_overflow="crop"):
                await asyncio.gather(*asking)
        else:
            for done in asyncio.as_completed(asking):
                _print_plain(await done, console)


async def _ask(answer: Answer, client: AsyncClient, target: str) -> Answer:
    try:
        async for _ in answer.generation.stream(client):
            pass
    except TandemError as error:
        answer.error = str(told(error, target))
    return answer


def _print_plain(answer: Answer, console: Console) -> None:
    console.print(f"> {textwrap.shorten(answer.prompt, 100, placeholder='...')}", markup=False, highlight=False, soft_wrap=True)
    console.print(answer.error or answer.generation.text.strip(), markup=False, highlight=False, soft_wrap=True)
    console.print()


def _traced(run: _Run) -> tuple[ReceivedSpan, ...]:
    """The trace of the first request whose KV was handed over, or else of the first with a trace."""
    by_id = {span.attributes.get(REQUEST_ID): span.trace_id for span in run.spans}
    for answer in sorted(run.answers, key=lambda one: one.path != "handover"):
        if trace_id := by_id.get(answer.generation.options.get("request_id")):
            return tuple(span for span in run.spans if span.trace_id == trace_id)
    return ()


def _print_run(run: _Run, console: Console) -> None:
    console.print(summary_table(run.answers))
    console.print()
    if trace := _traced(run):
        request_id = next(str(span.attributes[REQUEST_ID]) for span in trace if REQUEST_ID in span.attributes)
        console.print(f"trace {trace[0].trace_id} of request {request_id}", highlight=False)
        console.print(waterfall(trace, console.width))
    console.print()


def _print_log(log: _ServiceLog, path: Path, console: Console) -> None:
    lines = list(log.lines)[-30:]
    console.print(f"last {len(lines)} log lines of {path}:", style="bold")
    for line in lines:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _report(options: DemoOptions, run: _Run) -> Report:
    failed = [answer for answer in run.answers if answer.error]
    handed_over = [answer for answer in run.answers if answer.path == "handover" and not answer.error]
    services = {span.service for span in _traced(run)}
    problems = [*run.problems, *(f"{answer.prompt[:40]}: {answer.error}" for answer in failed)]
    if not handed_over:
        problems.append("no KV cache was handed over")
    if len(services) < (3 if options.stack.num_prefill else 2):
        problems.append(f"the trace shows only {sorted(services)}")
    values = {"requests": len(run.answers), "failed": len(failed), "handed_over": len(handed_over), **_totals(run)}
    details = {"problems": problems, "start_s": round(run.start_s, 3), "requests_detail": [_detail(answer) for answer in run.answers], "spans": len(run.spans)}
    return Report(options.target, Verdict.SHORT if problems else Verdict.OK, values, details)


def _totals(run: _Run) -> dict[str, int | float | str]:
    generations = [answer.generation for answer in run.answers]
    ttfts = [one.ttft_s for one in generations if one.ttft_s is not None]
    gaps = [gap for one in generations for gap in one.gaps_s]
    output_tokens = sum(one.num_output_tokens for one in generations)
    return {
        "prompt_tokens": sum(one.usage.prompt_tokens for one in generations if one.usage),
        "output_tokens": output_tokens,
        "ttft_p50_ms": round(float(np.percentile(ttfts, 50)) * 1e3, 1) if ttfts else "none",
        "itl_p50_ms": round(float(np.percentile(gaps, 50)) * 1e3, 1) if gaps else "none",
        "itl_p99_ms": round(float(np.percentile(gaps, 99)) * 1e3, 1) if gaps else "none",
        "tokens_per_s": round(output_tokens / run.wall_s, 1),
        "kv_bytes": sum(answer.kv_bytes for answer in run.answers),
        "transport": "+".join(sorted({answer.transport for answer in run.answers if answer.transport})) or "none",
    }


def _detail(answer: Answer) -> dict[str, object]:
    generation, usage = answer.generation, answer.generation.usage
    return {
        "prompt": answer.prompt,
        "text": generation.text,
        "error": answer.error,
        "prompt_tokens": usage.prompt_tokens if usage else 0,
        "cached_tokens": usage.cached_tokens if usage else 0,
        "output_tokens": generation.num_output_tokens,
        "ttft_s": generation.ttft_s,
        "itl_p50_s": answer.percentile_s(50),
        "itl_p99_s": answer.percentile_s(99),
        "tokens_per_s": generation.tokens_per_s,
        "trailers": dict(generation.path.trailers),
    }
