"""Two engines and a transport between them: real pools, real references, a real server for `inline`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.async_engine import AsyncEngine, ReservedSequence
from engine.events import Scheduled, Tokens
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from kvtransfer.budget import ByteBudget, ProgressLimit
from kvtransfer.errors import HandoverError
from kvtransfer.handover import Destination, Handover
from kvtransfer.hold import Hold, Holds, host_of
from kvtransfer.inline import InlineLimits, InlineReader, InlineSource
from kvtransfer.memory import MemoryReader, MemorySource
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import KvReader, KvSource
from rpc.channels import data_channel
from tandem.v1 import kv_pb2, prefill_pb2
from tests.support.engines import running_fake_engine

HOST = "ipv4:127.0.0.1"
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits until a condition holds that nothing announces."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Gate:
    """Holds copies open: the first `num_free` pass, the next ones wait until it is opened."""

    def __init__(self) -> None:
        self.num_free = 1_000_000
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._open_on_loop = asyncio.Event()

    def open(self) -> None:
        """Lets everything pass."""
        self._open.set()
        self._open_on_loop.set()

    def pass_in_thread(self) -> None:
        """Waits in a copy thread."""
        if self._counts():
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._open.wait(20)

    async def pass_on_loop(self) -> None:
        """Waits on the event loop, and can be cancelled there."""
        if self._counts():
            self.reached.set()
            await self._open_on_loop.wait()

    def _counts(self) -> bool:
        self.num_free -= 1
        return self.num_free < 0 and not self._open.is_set()


class GatedThread(Executor):
    """One thread whose every piece of work goes through the gate first."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._threads = ThreadPoolExecutor(1)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """As an executor's."""

        def gated() -> Any:
            self._gate.pass_in_thread()
            return function(*arguments, **named)

        return self._threads.submit(gated)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As an executor's."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)


@dataclass
class Ends:
    """Both ends of one transport."""

    prefill: AsyncEngine
    decode: AsyncEngine
    holds: Holds
    prefill_quarantine: Quarantine
    decode_quarantine: Quarantine
    transport: str
    source: KvSource
    reader: KvReader
    gate: Gate
    source_dies: Callable[[], Awaitable[None]]
    mangle: list[Callable[[bytes], list[bytes]]] = field(default_factory=list)
    """Replaces each message of `inline` on its way."""
    block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Pool blocks of computed prompts."""

    async def compute(self, prompt: tuple[int, ...], seq_id: str = "p") -> SampledToken:
        """Computes a prompt in prefill and holds it; its first token."""
        stream = self.prefill.submit(SequenceSpec(seq_id, prompt, SAMPLING, SequenceKind.PREFILL_ONLY, reader_id=f"of-{seq_id}"))
        while True:
            for event in await stream.get():
                if isinstance(event, Scheduled):
                    self.block_ids[seq_id] = event.block_ids
                if isinstance(event, Tokens):
                    return event.tokens[0]

    async def reserve(self, prompt: tuple[int, ...], seq_id: str = "d") -> ReservedSequence:
        """Reserves a prompt in decode."""
        return await self.decode.reserve(SequenceSpec(seq_id, prompt, SAMPLING, SequenceKind.REMOTE_KV))

    def hold(self, first_block: int, num_blocks: int, seq_id: str = "p") -> Hold:
        """Opens a hold on a computed prompt for a peer on this machine."""
        hold = self.holds.open(f"of-{seq_id}", HOST, first_block, num_blocks)
        hold.allocated(self.block_ids[seq_id])
        return hold

    def ready(self, hold: Hold, first_block: int, num_blocks: int) -> kv_pb2.KvReady:
        """An announcement as prefill sends it."""
        return kv_pb2.KvReady(hold_id=hold.hold_id, first_block=first_block, num_blocks=num_blocks, source=self.source.describe())

    def handover(self, reserved: ReservedSequence, seq_id: str = "d") -> Handover:
        """Starts decode's side."""
        block_bytes = self.decode.model.layout.block_bytes
        destination = Destination(seq_id, reserved.block_ids, reserved.num_cached_blocks, reserved.num_prompt_blocks, block_bytes)
        return Handover(destination, {self.transport: self.reader}, self.decode, self.decode_quarantine)


@asynccontextmanager
async def open_ends(transport: str, *, checksum: bool = False, chunk_bytes: int = 100, max_stop_s: float = 5.0) -> AsyncIterator[Ends]:
    """Both ends, started; chunks of 100 bytes straddle blocks of 128."""
    async with AsyncExitStack() as stack:
        prefill, _ = await stack.enter_async_context(running_fake_engine())
        decode, _ = await stack.enter_async_context(running_fake_engine())
        prefill_quarantine, decode_quarantine = Quarantine(max_stop_s=max_stop_s), Quarantine(max_stop_s=max_stop_s)
        holds = Holds(prefill, prefill_quarantine)
        gate = Gate()
        ends = Ends(prefill, decode, holds, prefill_quarantine, decode_quarantine, transport, None, None, gate, None)  # type: ignore[arg-type]
        open_transport = {"memory": _open_memory, "inline": _open_inline}[transport]
        await stack.enter_async_context(open_transport(ends, checksum, chunk_bytes))
        stack.callback(gate.open)
        yield ends


@asynccontextmanager
async def _open_memory(ends: Ends, checksum: bool, chunk_bytes: int) -> AsyncIterator[None]:
    source = MemorySource(ends.prefill.kv_cache.blocks, ends.holds)
    executor = GatedThread(ends.gate)

    async def die() -> None:
        source.close()
        for hold in list(ends.holds):
            ends.holds.close(hold)
        ends.gate.open()

    ends.source, ends.source_dies = source, die
    ends.reader = MemoryReader(ends.decode.kv_cache.blocks, executor, ByteBudget(1 << 20))
    try:
        yield
    finally:
        source.close()
        executor.shutdown()


@asynccontextmanager
async def _open_inline(ends: Ends, checksum: bool, chunk_bytes: int) -> AsyncIterator[None]:
    source = InlineSource(ends.prefill.kv_cache.blocks, ends.holds, chunk_bytes=chunk_bytes)

    async def read_kv(request: prefill_pb2.ReadKvRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async def write(message: bytes) -> None:
            await ends.gate.pass_on_loop()
            for mangled in ends.mangle[0](message) if ends.mangle else [message]:
                await context.write(mangled)

        try:
            await source.send(request, host_of(context.peer()), write)
        except HandoverError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[prefill_pb2.ReadKvRequest, bytes] = grpc.unary_stream_rpc_method_handler(read_kv, prefill_pb2.ReadKvRequest.FromString, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem.v1.PrefillService", {"ReadKv": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = data_channel(f"127.0.0.1:{port}")

    async def die() -> None:
        await server.stop(None)

    limits = InlineLimits(checksum=checksum, new_progress_limit=lambda: ProgressLimit(window_s=5.0, min_bytes=64))
    ends.source, ends.source_dies = source, die
    ends.reader = InlineReader(ends.decode.kv_cache.blocks, channel, ByteBudget(1 << 20), limits)
    try:
        yield
    finally:
        await channel.close()
        await server.stop(None)
