"""A worker's end of its line to the check: orders and deeds come in, pauses go out."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import REGISTRY

from checks.handover_faults_kinds import Kind, Order, Pause

_MAX_PAUSE_S = 20.0
_DEED_S = 20.0
Deed = Callable[..., Awaitable[object]]


class Line:
    """One fault at a time: it is ordered, taken by the first place that can have it, and counted where it happens."""

    def __init__(self, commands: Connection, pauses: Connection, *, verifies: bool) -> None:
        self.verifies = verifies
        """Whether the worker's own checks are on."""
        self._commands = commands
        self._pauses = pauses
        self._order: Order | None = None
        self._injected = Counter[Kind]()
        self._deeds: dict[str, Deed] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self) -> None:
        """Answers the check from a thread of its own, as long as the check lives."""
        threading.Thread(target=self._listen, name="faults", daemon=True).start()

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop that deeds are done on."""
        self._loop = loop

    def offer(self, name: str, deed: Deed) -> None:
        """What the check may ask for by name."""
        self._deeds[name] = deed

    def take(self, kinds: Collection[Kind], first_block: int) -> Order | None:
        """The order, if there is one of these kinds: its taker injects it and says so, or puts it back. Half of them are not for a prompt's first run."""
        order = self._order
        if order is None or order.kind not in kinds or (first_block == 0 and order.seed % 2):
            return None
        self._order = None
        return order

    def put_back(self, order: Order) -> None:
        """It was not possible here; the next one may take it."""
        self._order = order

    def injected(self, order: Order) -> None:
        """It has happened."""
        self._injected[order.kind] += 1

    async def pause(self, at: Pause) -> None:
        """Tells the check and waits for its word, as a copy that cannot be stopped would: a cancel is raised behind it."""
        waiting = asyncio.get_running_loop().run_in_executor(None, self.wait, at)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await asyncio.wait({waiting})
            raise

    def wait(self, at: Pause) -> bool:
        """The same in a thread; always True."""
        self._pauses.send(at)
        if not self._pauses.poll(_MAX_PAUSE_S):
            raise RuntimeError("the check did not end a pause")
        self._pauses.recv()
        return True

    def _listen(self) -> None:
        while True:
            try:
                name, arguments = self._commands.recv()
            except (EOFError, OSError):
                return
            try:
                answer: object = self._answer(name, arguments)
            except Exception as error:  # the check's to judge
                answer = error
            self._commands.send(answer)

    def _answer(self, name: str, arguments: tuple[object, ...]) -> object:
        if name == "order":
            (self._order,) = arguments  # type: ignore[assignment]
            return None
        if name == "withdraw":
            order, self._order = self._order, None
            return order is not None
        if name == "injected":
            return dict(self._injected)
        if name == "failures":
            return _failures()
        assert self._loop is not None, "the engine has not started"
        return asyncio.run_coroutine_threadsafe(_awaited(self._deeds[name], arguments), self._loop).result(_DEED_S)


async def _awaited(deed: Deed, arguments: tuple[object, ...]) -> object:
    return await deed(*arguments)


def _failures() -> dict[str, float]:
    """Failed hand-overs by reason, as this process's metrics count them."""
    samples = (sample for family in REGISTRY.collect() for sample in family.samples if sample.name == "tandem_kv_transfer_failures_total")
    return {sample.labels["reason"]: sample.value for sample in samples if sample.value}


def put_around(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces a class's method, or a module's function, in this process by what `make` gives for the original."""
    setattr(owner, name, make(getattr(owner, name)))
