"""An engine on a thread of its own, as an asyncio program sees it (design rule 7).

Calls go to the thread in the order in which they are posted, and are taken while a step runs; answers and events come back to the loop in one callback for
all that was there together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from engine import calls
from engine.engine import Engine
from engine.errors import EngineDeadError, EngineError
from engine.events import Event
from engine.report import EngineLoad, EngineReport
from engine.sampling_params import SampledToken
from engine.sequence import SequenceSpec

if TYPE_CHECKING:
    from engine.facts import ModelFacts
    from engine.kv_cache import HostKvCache

_log = logging.getLogger(__name__)
_WAIT_S = 1.0


class _Wake(Enum):
    """What comes to the thread besides calls."""

    STEP_DONE = "step done"
    STOP = "stop"


Posted = tuple[calls.Call, "asyncio.Future[object] | None"]
Answer = tuple["asyncio.Future[object]", object, Exception | None]


class SequenceStream:
    """Events of one sequence, buffered on the loop until its owner asks. Bounded by the sequence's own max_tokens."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._death: EngineDeadError | None = None

    async def get(self) -> list[Event]:
        """Waits for at least one event, or a nudge, and returns all that are there; raises EngineDeadError when the engine has died."""
        await self._arrived.wait()
        events, self._events = self._events, []
        if self._death is None:
            self._arrived.clear()
        elif not events:
            raise self._death
        return events

    def nudge(self) -> None:
        """Called on the loop: who waits in `get` is to look at something else."""
        self._arrived.set()

    def push(self, event: Event) -> None:
        """Called on the loop."""
        self._events.append(event)
        self._arrived.set()

    def die(self, error: EngineDeadError) -> None:
        """Called on the loop: after what is buffered, every `get` raises."""
        self._death = error
        self._arrived.set()


class ReservedSequence:
    """A reservation: its blocks, and the stream that speaks once decoding has begun."""

    def __init__(self, blocks: calls.ReservedBlocks, stream: SequenceStream) -> None:
        self.stream = stream
        self.block_ids = blocks.block_ids
        self.num_prompt_blocks = blocks.num_prompt_blocks
        self.num_cached_blocks = blocks.num_cached_blocks
        self.num_charged_blocks = blocks.num_charged_blocks


class AsyncEngine:
    """Owns the engine thread. All methods are for the loop that called `start`; none of them blocks it."""

    def __init__(self, engine: Engine, kv_cache: HostKvCache) -> None:
        self.model: ModelFacts = engine.model
        self.limits = engine.limits
        self.kv_cache = kv_cache
        self._engine = engine
        self._calls: queue.SimpleQueue[Posted | _Wake] = queue.SimpleQueue()
        self._streams: dict[str, SequenceStream] = {}
        self._futures: set[asyncio.Future[object]] = set()
        self._answers: list[Answer] = []
        self._load = engine.load()
        self._load_callbacks: list[Callable[[EngineLoad], None]] = []
        self._death_callbacks: list[Callable[[BaseException], None]] = []
        self._death: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ended = asyncio.Event()
        self._beat = 0
        self._idle = True
        self._computing = False
        """A step is in flight."""
        self._stopping = False
        self._checked = False
        self._looked_ns = 0

    # Life

    async def start(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step it is in; raises TimeoutError when that takes longer."""
        if self._loop is None:
            return
        self._calls.put(_Wake.STOP)
        async with asyncio.timeout(timeout_s):
            await self._ended.wait()
            # Joined, not only told: a thread that still drops tensors while the interpreter ends aborts the process.
            await asyncio.to_thread(self._thread.join)

    @property
    def death(self) -> BaseException | None:
        """Why the thread has ended, None while it lives."""
        return self._death

    def beat(self) -> int | None:
        """Grows with every step and every idle turn of the thread; None while it waits for calls with nothing to compute. For the watchdog.

        It stands still while a step runs, whatever calls are taken meanwhile: a step that hangs is an engine that hangs.
        """
        return None if self._idle else self._beat

    def on_death(self, callback: Callable[[BaseException], None]) -> None:
        """Calls back on the loop when the thread ends by an error."""
        self._death_callbacks.append(callback)

    def on_load(self, callback: Callable[[EngineLoad], None]) -> None:
        """Calls back on the loop after every turn that changed something."""
        self._load_callbacks.append(callback)

    def load(self) -> EngineLoad:
        """The latest snapshot."""
        return self._load

    # Sequences

    def submit(self, spec: SequenceSpec) -> SequenceStream:
        """Posts a sequence that is computed here. The caller owes a `release` in a `finally`."""
        stream = self._open(spec)
        self._post(calls.Submit(spec))
        return stream

    async def reserve(self, spec: SequenceSpec) -> ReservedSequence:
        """Takes all blocks of a sequence whose KV comes from elsewhere; raises CapacityError, SequenceTooLongError.

        The caller owes a `release`, whatever this raises.
        """
        stream = self._open(spec)
        blocks = await self._ask(calls.Reserve(spec))
        assert isinstance(blocks, calls.ReservedBlocks)
        return ReservedSequence(blocks, stream)

    async def commit(self, seq_id: str, first: tuple[SampledToken, ...]) -> None:
        """The hand-over is confirmed: each sample decodes on behind its first token; see calls.Commit. Raises HoldBrokenError."""
        await self._ask(calls.Commit(seq_id, first))

    def release(self, seq_id: str) -> None:
        """Posts the end of a sequence in whatever state. No await, idempotent, behind all that was posted before; harmless after the engine's death."""
        self._streams.pop(seq_id, None)
        self._post(calls.Release(seq_id, time.monotonic_ns()))

    async def acquire(self, reader_id: str, seq_id: str, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """References of a reader's own on a run of prompt blocks; returns their pool ids, raises HoldBrokenError.

        The caller owes a `drop`, whatever this raises.
        """
        blocks = await self._ask(calls.Acquire(reader_id, seq_id, first_block, num_blocks))
        assert isinstance(blocks, tuple)
        return blocks

    def drop(self, reader_id: str) -> None:
        """Posts that the reader can touch the memory no more. No await, idempotent."""
        self._post(calls.Drop(reader_id))

    async def confirm(self, seq_id: str, num_blocks: int) -> bool:
        """Whether all `num_blocks` prompt blocks have been held without a break since they were announced."""
        return bool(await self._ask(calls.Confirm(seq_id, num_blocks)))

    async def report(self) -> EngineReport:
        """Everything by owner and state; also the proof that the thread answers."""
        report = await self._ask(calls.Report())
        assert isinstance(report, EngineReport)
        return report

    # The loop's side

    def _open(self, spec: SequenceSpec) -> SequenceStream:
        if spec.seq_id in self._streams:
            raise ValueError(f"sequence {spec.seq_id} is there already")
        stream = self._streams[spec.seq_id] = SequenceStream()
        if self._death is not None:
            stream.die(EngineDeadError(str(self._death)))
        return stream

    def _post(self, call: calls.Call) -> None:
        if self._death is None:
            self._calls.put((call, None))

    async def _ask(self, call: calls.Call) -> object:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        self._calls.put((call, future))
        try:
            return await future
        finally:
            self._futures.discard(future)

    def _deliver(self, answers: list[Answer], events: list[tuple[str, Event]], load: EngineLoad) -> None:
        for future, value, error in answers:
            if future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        for seq_id, event in events:
            stream = self._streams.get(seq_id)
            if stream is not None:
                stream.push(event)
        self._load = load
        for callback in self._load_callbacks:
            callback(load)

    def _die(self, cause: BaseException | None) -> None:
        self._death = cause or EngineDeadError("the engine has stopped")
        error = EngineDeadError(str(self._death) or type(self._death).__name__)
        for future in self._futures:
            if not future.done():
                future.set_exception(error)
        for stream in self._streams.values():
            stream.die(error)
        self._ended.set()
        if cause is not None:
            for callback in self._death_callbacks:
                callback(cause)

    # The thread's side

    def _run(self) -> None:
        assert self._loop is not None
        cause: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as error:  # the thread's death is told to every waiter, whatever it was
            _log.critical("the engine thread has died", exc_info=error)
            cause = error
        with contextlib.suppress(RuntimeError):  # the loop itself is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._die, cause)
        # Behind the word of the death: a step that hangs would keep it back.
        self._engine.close()

    def _turn(self) -> bool:
        """Waits for something to come, takes all that is there, then launches a step if none is in flight; False when told to stop.

        What was asked and what the last step brought is told first: a launch takes longer than all the rest.
        """
        if not self._computing:
            self._beat += 1
        num_taken = self._take_calls()
        told = bool(self._answers) or self._engine.has_events
        if told:
            self._tell()
        if not self._computing and not self._stopping:
            self._launch()
        if self._engine.has_events or (num_taken and not told):
            self._tell()
            told = True
        if told:
            self._checked = False
        elif not self._checked and not self._computing:
            self._engine.check()
            self._checked = True
        return self._computing or not self._stopping

    def _launch(self) -> None:
        # Where a step could do nothing only a call changes that: sequences that wait for blocks keep no thread busy.
        future = self._engine.launch(self._looked_ns)
        if future is not None:
            self._computing = True
            future.add_done_callback(lambda _: self._calls.put(_Wake.STEP_DONE))

    def _tell(self) -> None:
        answers, self._answers = self._answers, []
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, answers, self._engine.take_events(), self._engine.load())

    def _take_calls(self) -> int:
        """Waits a bounded time for the first item, then takes all that are there; returns how many those were."""
        num_taken = 0
        while True:
            wait = num_taken == 0
            self._looked_ns = time.monotonic_ns()
            try:
                self._idle = wait and not self._computing
                item = self._calls.get(timeout=_WAIT_S) if wait else self._calls.get_nowait()
            except queue.Empty:
                return num_taken
            finally:
                self._idle = False
            self._take(item)
            num_taken += 1

    def _take(self, item: Posted | _Wake) -> None:
        if item is _Wake.STOP:
            self._stopping = True
        elif item is _Wake.STEP_DONE:
            self._engine.complete()
            self._computing = False
            self._beat += 1
        else:
            self._answer(*item)

    def _answer(self, call: calls.Call, future: asyncio.Future[object] | None) -> None:
        """An EngineError is the caller's answer; anything else is a broken invariant and the thread's end."""
        try:
            value, error = self._engine.handle(call), None
        except EngineError as raised:
            if future is None:
                raise
            value, error = None, raised
        if future is not None:
            self._answers.append((future, value, error))
