"""The flags of `tandem bench`, named as `vllm bench serve` names them where the meaning is the same."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NoReturn

from bench.openai_target import Endpoint

DEFAULT_TARGET = "127.0.0.1:50051"


class UsageError(Exception):
    """Flags that do not go together; the text is for the user."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process, so that whoever runs it ends it in his own way."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser(prog: str) -> Parser:
    """With the commands run, sweep and report."""
    top = Parser(prog=prog, description="Loads a server from outside and says what its clients feel.", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="{run,sweep,report}")
    run = commands.add_parser("run", help="One run: an open loop (--request-rate, --trace) or a closed one (--max-concurrency).", allow_abbrev=False)
    sweep = commands.add_parser("sweep", help="Raises the rate to the knee, and on to twice of it.", allow_abbrev=False)
    report = commands.add_parser("report", help="One HTML page of one run, or of several side by side.", allow_abbrev=False)
    for each in (run, sweep):
        _add_server(each)
        _add_load(each)
        _add_limits(each)
    _add_arrivals(run)
    _add_search(sweep)
    for each in (run, sweep, report):
        _add_judging(each)
    _add_output(run)
    _add_output(sweep)
    report.add_argument("files", nargs="+", type=Path, metavar="FILE", help="<label>.json of a run or of a sweep.")
    report.add_argument("--output", type=Path, default=None, metavar="FILE", help="The page. Default: report.html beside the first file.")
    report.add_argument("--title", default="", help="Its heading.")
    return top


def _add_server(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("server")
    group.add_argument("--backend", choices=("tandem", "openai", "vllm", "openai-chat"), help="Default: openai with --base-url, else tandem.")
    group.add_argument("--target", metavar="HOST:PORT", help=f"Tandem's gateway over gRPC. Default: TANDEM_GATEWAY, or {DEFAULT_TARGET}.")
    group.add_argument("--base-url", metavar="URL", help="An OpenAI-compatible server, with or without /v1.")
    group.add_argument("--model", default="", help="Id of a served model; needed only when there are several.")
    group.add_argument("--endpoint", choices=[each.value for each in Endpoint], help="OpenAI: completions with token ids (default), or chat with text.")
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="Folder with tokenizer.json: prompts go out as text. Needed for chat.")
    group.add_argument("--no-ignore-eos", action="store_true", help="OpenAI: leave out ignore_eos and its like, for servers that refuse them.")
    group.add_argument("--no-continuous-usage", action="store_true", help="OpenAI: leave out continuous_usage_stats; tokens are counted by messages.")
    group.add_argument("--temperature", type=float, default=0.0, help="Default 0: greedy.")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="OpenAI: further header. OPENAI_API_KEY is sent when set.")
    group.add_argument("--extra-body", default="{}", metavar="JSON", help="OpenAI: further fields of each request.")


def _add_load(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("load")
    names = "Lengths, and prefixes that prompts share; an unknown name lists the known ones."
    group.add_argument("--workload", "--dataset", "--dataset-name", default="fixed", metavar="NAME", help=names)
    group.add_argument("--num-prompts", type=_count, metavar="N", help="Requests without the warm-up. Default: as many as --duration takes, or 100.")
    group.add_argument("--duration", type=_positive, metavar="S", help="Time in which requests are sent, without the warm-up.")
    group.add_argument("--num-warmups", type=_count_or_none, default=None, metavar="N", help="Requests ahead of the others that are in no figure.")
    group.add_argument("--burstiness", type=_positive_or_infinite, default=1.0, help="Shape of the gamma gaps: 1 Poisson, below 1 bursts, inf even.")
    group.add_argument("--seed", type=int, default=0, help="Of prompts, lengths and arrivals. Default 0.")
    group.add_argument("--scale", type=_positive, default=1.0, help="All lengths of the workload times this: for models with a short context.")
    group.add_argument("--input-len", "--random-input-len", default="", metavar="N or A:B", help="Prompt tokens of the workloads fixed and uniform.")
    group.add_argument("--output-len", "--random-output-len", default="", metavar="N or A:B", help="Output tokens of fixed and uniform.")
    group.add_argument("--vocab-size", type=_count, metavar="N", help="Prompt tokens are below it. Default: the server's or the model directory's.")
    group.add_argument("--literal", action="store_true", help="Mooncake: keep its 3-second bursts instead of spreading them.")


def _add_arrivals(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("arrivals: exactly one of")
    when = group.add_mutually_exclusive_group(required=True)
    when.add_argument("--request-rate", type=_positive, metavar="R", help="Open loop: requests a second, whatever becomes of them.")
    when.add_argument("--trace", type=_positive, nargs="?", const=1.0, metavar="SPEED", help="Open loop: the workload's own times, SPEED times as fast.")
    when.add_argument("--max-concurrency", type=_count, metavar="N", help="Closed loop: so many are always out. It hides the waiting that it causes.")


def _add_search(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("search")
    group.add_argument("--start-rate", type=_positive, default=1.0, metavar="R", help="Requests a second of the first probe.")
    group.add_argument("--min-rate", type=_positive, default=0.01, metavar="R", help="No lower.")
    group.add_argument("--max-rate", type=_positive, default=1000.0, metavar="R", help="No higher.")
    group.add_argument("--width", type=_positive, default=0.1, help="How far apart good and bad may be at the end, as a share. Default 0.1.")
    group.add_argument("--attainment", type=_positive, default=0.9, help="Share of requests that must meet the limits. Default 0.9.")
    group.add_argument("--max-probes", type=_count, default=40, help="In all.")


def _add_limits(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("bounds, in seconds")
    group.add_argument("--request-timeout", type=_positive, default=300.0, metavar="S", help="Of a request.")
    group.add_argument("--max-run-time", type=_positive, default=3600.0, metavar="S", help="Nothing is sent after it; an open loop that it cuts is void.")
    group.add_argument("--drain-timeout", type=_positive, default=60.0, metavar="S", help="What is out so long after the last request was sent is a timeout.")
    group.add_argument("--no-cold-start", action="store_true", help="Leave out the one request ahead of all others.")


def _add_judging(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("judging")
    group.add_argument(
        "--goodput", action="append", nargs="+", default=[], metavar="NAME:MS", help="Limits, as ttft:500 tpot:50 e2e:10000 in ms. May be repeated."
    )
    group.add_argument("--price", type=float, metavar="P", help="Of one device for one hour, in --currency: gives the cost of a million tokens.")
    group.add_argument("--num-devices", type=_count, default=1, metavar="N", help="Devices that are paid for.")
    group.add_argument("--currency", default="USD")


def _add_output(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("output")
    group.add_argument("--output", type=Path, default=Path("out/bench"), metavar="DIR", help="Folder of <label>.json, .jsonl and .html. Default out/bench.")
    group.add_argument("--label", default="", help="What reports call it. Default: server, workload and arrivals.")
    group.add_argument("--no-report", action="store_true", help="Write no HTML.")
    group.add_argument("--quiet", action="store_true", help="No progress.")
    group.add_argument("--model-dir", type=Path, metavar="DIR", help="The model's folder: its hash is noted, and its vocabulary used.")
    group.add_argument("--cores", action="append", default=[], metavar="PROCESS=CORES", help="What each of the server's processes runs on; noted.")
    group.add_argument("--note", action="append", default=[], metavar="TEXT", help="Noted with the run: the server's flags, for one.")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def _positive_or_infinite(text: str) -> float:
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _positive(text: str) -> float:
    if math.isinf(value := _positive_or_infinite(text)):
        raise argparse.ArgumentTypeError(f"{text} has no end")
    return value


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    return value


def _count(text: str) -> int:
    return _whole(text, 1)


def _count_or_none(text: str) -> int:
    return _whole(text, 0)
