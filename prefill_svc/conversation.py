"""One Prefill RPC: compute, announce, first tokens, and the hold until decode has confirmed its copy (design rules 1 and 2)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc

from engine.async_engine import SequenceStream
from engine.events import ChunkComputed, Event, Failed, Finished, PromptLogprobs, Scheduled, Tokens
from engine.proto import first_token_to_proto, token_to_proto
from engine.sampling_params import SampledToken
from kvtransfer.copying import run_to_its_end
from kvtransfer.hold import CONFIRMED, Hold
from prefill_svc.pool import PrefillPool
from prefill_svc.prompt import Prompt
from rpc.errors import StatusError, aborted, invalid_argument
from rpc.failpoints import failpoint
from tandem.v1 import kv_pb2, prefill_pb2
from telemetry import spans
from telemetry.tracing import current_context, record_span
from worker.pieces import pieces
from worker.progress import PromptProgress
from worker.statuses import engine_errors, status_of

_MAX_RUN_BLOCKS = 4096
"""Most blocks of one announcement, which has a few numbers for each."""
_DIGEST_BATCH_BLOCKS = 16
Context = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


class Conversation:
    """The state of one Prefill RPC. `run` is its whole life."""

    def __init__(self, pool: PrefillPool, prompt: Prompt, context: Context) -> None:
        self._pool = pool
        self._prompt = prompt
        self._context = context
        self._trace = current_context()
        self._hold: Hold | None = None
        self._next_request: asyncio.Future[Any] | None = None
        self._first: dict[int, SampledToken] = {}
        """First tokens by sample."""
        self._complete = False
        self._progress = PromptProgress()

    async def run(self) -> None:
        """Raises StatusError; whatever ends it, sequence and hold are given back."""
        engine, spec = self._pool.engine, self._prompt.spec
        try:
            await failpoint(spans.PREFILL_QUEUE)
            if self._prompt.source is not None:
                first = self._prompt.first_block
                self._hold = self._pool.holds.open(spec.reader_id, self._prompt.pairing_id, first, self._prompt.num_blocks - first)
            stream = engine.submit(spec)
            # Read on while computing: decode's end of input is its going away.
            self._next_request = asyncio.ensure_future(self._context.read())
            self._next_request.add_done_callback(lambda _: stream.nudge())
            with engine_errors():
                await self._compute(stream)
                await self._write(done=await self._done())
                if self._hold is not None:
                    await self._confirm(self._hold)
        finally:
            self._progress.abandon()
            if self._next_request is not None:
                self._next_request.cancel()
            engine.release(spec.seq_id)
            if self._hold is not None:
                # Behind the release: a drop in front of it could meet a sequence that has yet to be scheduled, with its reader.
                self._pool.holds.close(self._hold)

    async def _compute(self, stream: SequenceStream) -> None:
        while not self._complete:
            for event in await self._events(stream):
                await self._take(event)

    async def _events(self, stream: SequenceStream) -> list[Event]:
        """The next events, or the end of the RPC when decode goes away first."""
        assert self._next_request is not None
        events = await stream.get()
        if not self._next_request.done():
            return events
        if self._next_request.result() is grpc.aio.EOF:
            raise _gone()
        raise invalid_argument("step", "nothing may follow start before PrefillDone")

    async def _take(self, event: Event) -> None:
        self._progress.take(event)
        match event:
            case ChunkComputed():
                await self._announce(event.num_filled_blocks)
            case PromptLogprobs():
                for piece in pieces(event.logprobs):
                    await self._write(prompt_logprobs=prefill_pb2.PromptLogprobs(logprobs=map(token_to_proto, piece)))
            case Tokens():
                self._first[event.index] = event.tokens[0]
                self._complete = len(self._first) == self._prompt.spec.sampling.n
            case Finished() if self._prompt.spec.sampling.max_tokens == 0:
                self._complete = True
            case Failed():
                raise status_of(event.error)
            case Scheduled():
                if self._hold is not None:
                    self._hold.allocated(event.block_ids)
            case _:
                pass

    async def _announce(self, num_filled_blocks: int) -> None:
        if self._hold is None:
            return
        first, num_new = self._hold.announce(num_filled_blocks)
        for start in range(first, first + num_new, _MAX_RUN_BLOCKS):
            await self._write(kv_ready=await self._ready(self._hold, start, min(_MAX_RUN_BLOCKS, first + num_new - start)))

    async def _ready(self, hold: Hold, first_block: int, num_blocks: int) -> kv_pb2.KvReady:
        ready = kv_pb2.KvReady(hold_id=hold.hold_id, first_block=first_block, num_blocks=num_blocks)
        ids = hold.pool_ids[first_block : first_block + num_blocks]
        if self._prompt.source is not None and self._prompt.source.one_sided:
            generations = [self._pool.engine.kv_cache.generations[block] for block in ids]
            if not all(generation % 2 for generation in generations):
                raise RuntimeError(f"a hold's blocks {first_block}+{num_blocks} are held by nobody")
            ready.block_ids.extend(ids)
            ready.generations.extend(generations)
        if self._prompt.checksum:
            ready.digests.extend(await self._digests(ids))
        return ready

    async def _digests(self, ids: Sequence[int]) -> list[int]:
        """Whatever ends this RPC, sequence and hold are given back after the digests' thread has ended: `run` goes on only then."""
        digests: list[int] = []

        def work(stop: threading.Event) -> None:
            for start in range(0, len(ids), _DIGEST_BATCH_BLOCKS):
                if stop.is_set():
                    return
                digests.extend(self._pool.memory.digests(ids[start : start + _DIGEST_BATCH_BLOCKS]))

        await run_to_its_end(self._pool.executor, work, threading.Event())
        return digests

    async def _done(self) -> prefill_pb2.PrefillDone:
        await failpoint(spans.PREFILL)
        progress = self._progress
        progress.end()
        self._pool.metrics.request_prefill_time_seconds.observe(progress.prefill_s)
        return prefill_pb2.PrefillDone(
            first_tokens=[first_token_to_proto(token) for _, token in sorted(self._first.items())],
            cached_tokens=progress.cached_tokens,
            computed_tokens=progress.computed_tokens,
            num_blocks=self._hold.num_announced_blocks if self._hold else 0,
            queue_s=progress.queue_s,
            prefill_s=progress.prefill_s,
            hold_id=self._hold.hold_id if self._hold else "",
        )

    async def _confirm(self, hold: Hold) -> None:
        """Holds until decode says that its readers have finished, and answers whether the blocks were held all the while."""
        started_ns = time.monotonic_ns()
        error: str | None = "cancelled"
        try:
            assert self._next_request is not None
            request = await self._next_request
            if request is grpc.aio.EOF:
                raise _gone()
            self._check_copied(request, hold)
            await failpoint(spans.KV_HOLD)
            if not await self._pool.engine.confirm(self._prompt.spec.seq_id, self._prompt.num_blocks):
                raise aborted("HOLD_BROKEN", "the blocks were not held without a break")
            # With the status, in one message: nothing can come between the two.
            self._context.set_trailing_metadata(((CONFIRMED, hold.hold_id),))
            error = None
        except StatusError as status:
            error = status.code.name
            raise
        finally:
            attributes = {spans.NUM_BLOCKS: hold.num_announced_blocks}
            record_span(spans.KV_HOLD, started_ns, time.monotonic_ns(), parent=self._trace, attributes=attributes, error=error)

    def _check_copied(self, request: prefill_pb2.PrefillRequest, hold: Hold) -> None:
        if request.WhichOneof("step") != "copied":
            raise invalid_argument("step", "only copied may follow start")
        copied = request.copied
        if copied.hold_id != hold.hold_id or copied.num_blocks != hold.num_announced_blocks:
            raise aborted("COPIED_MISMATCH", f"{copied.num_blocks} blocks were copied, {hold.num_announced_blocks} of this hold were announced")
        # Who reads on its own leaves no trace here; decode compares the generations instead.
        if hold.num_unread_blocks and self._prompt.source is not None and not self._prompt.source.one_sided:
            raise aborted("COPIED_UNREAD", f"{hold.num_unread_blocks} announced blocks were never read")

    async def _write(self, **step: Any) -> None:
        await self._context.write(prefill_pb2.PrefillResponse(**step))


def _gone() -> StatusError:
    # An end of input is never taken for consent: a cancelled stream can look like one.
    return StatusError(grpc.StatusCode.CANCELLED, "decode ended the stream without Copied")
