"""`tandem up`: the three services on this machine until they are told to stop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from cli.errors import UserError
from cli.stack import Stack, StackOptions

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


class PrefixedLog:
    """Prints log lines of several services, each behind its name and in its colour."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        """Prints one line, never wrapped or read as markup."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._console.print(Text.assemble((f"{name:<10}", colour), "| ", Text.from_ansi(line)), soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True)
class UpLimits:
    """Bounds of start and stop, in seconds."""

    start_s: float
    drain_s: float


@contextmanager
def stop_signals() -> Iterator[asyncio.Queue[signal.Signals]]:
    """SIGTERM and SIGINT go into the yielded queue for the while."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)
    for signum in caught:
        loop.add_signal_handler(signum, signals.put_nowait, signum)
    try:
        yield signals
    finally:
        for signum in caught:
            loop.remove_signal_handler(signum)


async def up(options: StackOptions, limits: UpLimits, console: Console) -> int:
    """Runs until a signal comes (returns 0) or a child ends (says which and returns 1). Always drains; a second signal kills."""
    stack = Stack(options, PrefixedLog(console))
    with stop_signals() as signals:
        stopped = asyncio.create_task(signals.get())
        running = asyncio.create_task(_start_and_watch(stack, limits, console))
        await asyncio.wait([stopped, running], return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if running.done():
            code = 1
            console.print(f"tandem up: {running.result()}; stopping the others", style="bold red", highlight=False)
        else:
            running.cancel()
            await asyncio.wait([running])
            console.print(f"tandem up: {stopped.result().name}: draining; once more kills", style="bold", highlight=False)
        draining = asyncio.create_task(stack.drain(limits.drain_s))
        killed = asyncio.create_task(_kill_on_signal(stack, signals))
        not_clean = await draining
        stopped.cancel()
        killed.cancel()
        await asyncio.gather(stopped, killed, return_exceptions=True)
    console.print(f"tandem up: stopped{''.join(f'; {exit_}' for exit_ in not_clean)}", style="bold", highlight=False)
    return code or int(bool(not_clean))


async def _start_and_watch(stack: Stack, limits: UpLimits, console: Console) -> str:
    """Returns why the services cannot go on."""
    started = time.monotonic()
    await stack.start()
    try:
        await stack.wait_until_ready(limits.start_s)
    except UserError as error:
        return str(error)
    addresses = ", ".join(f"{name} {address}" for name, address in stack.addresses.items())
    if stack.http_url is not None:
        addresses += f", OpenAI door {stack.http_url}"
    console.print(f"tandem up: ready after {time.monotonic() - started:.1f} s: {addresses}; Ctrl-C stops", style="bold green", highlight=False, soft_wrap=True)
    return str(await stack.wait_for_exit())


async def _kill_on_signal(stack: Stack, signals: asyncio.Queue[signal.Signals]) -> None:
    await signals.get()
    stack.kill()
