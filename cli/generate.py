"""`tandem generate` and `tandem chat`: text from a gateway into a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from rich.console import Console

from cli.errors import UserError
from cli.generation import Generation, gateway_client, told
from cli.sample_writer import SampleWriter
from tandem_client import AsyncClient, ChatMessage, Options, Sampling, TandemError

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What `generate` and `chat` have in common."""

    target: str
    system: str | None
    sampling: Sampling
    model: str = ""
    timeout_s: float | None = None
    echo: bool = False

    def generation(self, prompt: str | list[ChatMessage]) -> Generation:
        """A call with these options; a conversation begins with the system message, where there is one."""
        options: Options = {"model": self.model, "timeout_s": self.timeout_s, "echo": self.echo}
        options = {**options, **self.sampling}
        if isinstance(prompt, str) or self.system is None:
            return Generation(prompt, options)
        return Generation([{"role": "system", "content": self.system}, *prompt], options)


async def generate(prompt: str, options: GenerateOptions, *, raw: bool, write: Write, console: Console) -> None:
    """Streams one completion to `write`, and a line of measurements to `console`. Raises UserError."""
    generation = options.generation(prompt if raw else [{"role": "user", "content": prompt}])
    async with gateway_client(options.target) as client:
        await _stream(generation, client, options, write)
    _print_summary(generation, console)


async def _stream(generation: Generation, client: AsyncClient, options: GenerateOptions, write: Write) -> None:
    out = SampleWriter(options.sampling.get("n") or 1, write)
    try:
        async with aclosing(generation.stream(client)) as pieces:
            async for piece in pieces:
                out.add(piece)
    except TandemError as error:
        out.break_off()
        raise told(error, options.target) from None


def _print_summary(generation: Generation, console: Console) -> None:
    if generation.usage is None or generation.ttft_s is None or generation.tokens_per_s is None or not console.is_terminal:
        return
    usage, path = generation.usage, generation.path.kind or "?"
    console.print(
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens ({usage.cached_tokens} cached), first after {generation.ttft_s * 1e3:.0f} ms, "
        f"{generation.tokens_per_s:.1f} tokens/s, path {path}",
        style="dim",
        highlight=False,
    )


class Chat:
    """A conversation. Ctrl-C while an answer comes cancels it and keeps what was said; at the prompt it clears the line; Ctrl-D ends."""

    def __init__(self, options: GenerateOptions, console: Console, write: Callable[[str], None] | None = None) -> None:
        """`write` takes the answers' text as it comes; standard output without it."""
        self._options = options
        self._console = console
        self._write = write or _write_out
        self._turns: list[ChatMessage] = []

    def run(self, read_line: Callable[[str], str] = input) -> None:
        """Reads lines and answers them until the end of input. Raises UserError when the gateway cannot be reached at the first turn."""
        with suppress(ImportError):  # gives `input` a history and line editing, where Python was built with it
            import readline  # noqa: F401
        self._console.print("Ctrl-C cancels an answer, /reset forgets the conversation, Ctrl-D or /exit ends.", style="dim", highlight=False)
        with asyncio.Runner() as runner:
            client = gateway_client(self._options.target)
            try:
                while (line := self._next_line(read_line)) is not None:
                    self._answer(runner, client, line)
            finally:
                runner.run(client.close())

    def _next_line(self, read_line: Callable[[str], str]) -> str | None:
        while True:
            try:
                line = read_line("> ").strip()
            except KeyboardInterrupt:
                self._console.print()
                continue
            except EOFError:
                self._console.print()
                return None
            if line == "/exit":
                return None
            if line == "/reset":
                self._turns.clear()
                self._console.print("forgotten", style="dim")
            elif line:
                return line

    def _answer(self, runner: asyncio.Runner, client: AsyncClient, line: str) -> None:
        turns: list[ChatMessage] = [*self._turns, {"role": "user", "content": line}]
        generation = self._options.generation(turns)
        try:
            runner.run(_stream(generation, client, self._options, self._write))
            _print_summary(generation, self._console)
        except KeyboardInterrupt:
            self._write("\n")
            self._console.print("cancelled", style="yellow")
        except UserError as error:
            if not self._turns and error.exit_code == 2:
                raise
            self._console.print(str(error), style="red", markup=False, highlight=False)
        if generation.text:
            self._turns = [*turns, {"role": "assistant", "content": generation.text}]


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def read_prompt(argument: str) -> str:
    """The argument itself, or standard input for "-"."""
    if argument != "-":
        return argument
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: {error}") from None


def generate_to_stdout(prompt: str, options: GenerateOptions, *, raw: bool) -> None:
    """`tandem generate`."""
    asyncio.run(generate(read_prompt(prompt), options, raw=raw, write=_write_out, console=Console(stderr=True)))
