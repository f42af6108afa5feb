"""Two engines, a pairing and a transport between them: real pools, real references, real parts of every transport."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import xxhash

from engine.async_engine import AsyncEngine, ReservedSequence
from engine.events import Scheduled, Tokens
from engine.proto import kv_layout_to_proto
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from kvtransfer.budget import ByteBudget
from kvtransfer.choice import Chosen, choose
from kvtransfer.handover import Handover
from kvtransfer.hold import Hold, Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import BlockMemory, Blocks, HostBlocks
from kvtransfer.pairing import NONCE_BYTES, PROCESS_ID, Pairing, boot_id
from kvtransfer.path import Destination, KvPath, PathParts
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import KvReader
from tandem.v1 import kv_pb2, prefill_pb2
from tests.kvtransfer.kinds import Gate, GatedThread, Opened, TwoPools, kinds
from tests.support.engines import running_fake_engine

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits until a condition holds that nothing announces."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Paired:
    """One pairing: what both ends said, and the reader that was greeted with it."""

    pairing: Pairing
    offer: prefill_pb2.PairResponse
    reader: KvReader


@dataclass
class Ends:
    """Both ends of one transport, paired, its reader attached."""

    prefill: AsyncEngine
    decode: AsyncEngine
    two: TwoPools
    opened: Opened
    prefill_quarantine: Quarantine
    decode_quarantine: Quarantine
    paired: Paired
    path: KvPath
    checksum: bool
    block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Pool blocks of computed prompts."""

    @property
    def holds(self) -> Holds:
        """Prefill's."""
        return self.two.holds

    @property
    def gate(self) -> Gate:
        """Holds copies open."""
        return self.two.gate

    @property
    def mangle(self) -> list[Callable[[bytes], list[bytes]]]:
        """See TwoPools."""
        return self.two.mangle

    @property
    def reader(self) -> KvReader:
        """The attached one."""
        return self.paired.reader

    @property
    def transport(self) -> str:
        """Its own name."""
        return self.paired.reader.name

    @property
    def memory(self) -> BlockMemory:
        """Decode's pool as the reader takes it."""
        return self.opened.memory or HostBlocks(self.decode.kv_cache.blocks)

    def prefill_bytes(self, block_ids: Sequence[int]) -> Blocks:
        """A copy of these blocks."""
        blocks = self.opened.prefill_blocks() if self.opened.prefill_blocks else self.prefill.kv_cache.blocks
        return blocks[list(block_ids)]

    def decode_bytes(self, block_ids: Sequence[int] | None = None) -> Blocks:
        """A copy of these blocks, or of all."""
        blocks = self.opened.decode_blocks() if self.opened.decode_blocks else self.decode.kv_cache.blocks
        return blocks[list(block_ids) if block_ids is not None else slice(None)].copy()

    async def pair(self, *, alter_probe: bool = False) -> Paired:
        """One more pairing, whose reader is greeted and not yet attached."""
        return await _pair(self.prefill, self.decode, self.two, self.opened, alter_probe=alter_probe)

    async def choose(self, paired: Paired) -> Chosen:
        """What decode makes of the offer."""
        return await choose(paired.offer, [paired.reader], min_bytes_per_s=1.0)

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
        """Opens a hold on a computed prompt for this pairing."""
        hold = self.holds.open(f"of-{seq_id}", self.paired.pairing.pairing_id, first_block, num_blocks)
        hold.allocated(self.block_ids[seq_id])
        return hold

    def ready(self, hold: Hold, first_block: int, num_blocks: int) -> kv_pb2.KvReady:
        """An announcement as prefill sends it."""
        ids = hold.pool_ids[first_block : first_block + num_blocks]
        ready = kv_pb2.KvReady(hold_id=hold.hold_id, first_block=first_block, num_blocks=num_blocks)
        if self.opened.source.one_sided:
            ready.block_ids.extend(ids)
            ready.generations.extend(self.prefill.kv_cache.generations[block] for block in ids)
        if self.checksum:
            ready.digests.extend(xxhash.xxh3_64_intdigest(block.tobytes()) for block in self.prefill_bytes(ids))
        return ready

    def destination(self, reserved: ReservedSequence, prompt: tuple[int, ...], seq_id: str = "d") -> Destination:
        """Where the prompt goes."""
        cached = min(reserved.num_cached_blocks * self.decode.model.layout.block_size, len(prompt))
        return Destination(seq_id, reserved.block_ids, cached, len(prompt))

    def handover(self, reserved: ReservedSequence, prompt: tuple[int, ...], seq_id: str = "d") -> Handover:
        """Starts decode's side."""
        return Handover(self.destination(reserved, prompt, seq_id), self.path, self.decode, self.decode_quarantine)

    async def source_dies(self) -> None:
        """Prefill's side ends: no transport, no hold, no block."""
        await self.opened.dies()
        for hold in list(self.holds):
            self.holds.close(hold)
        for seq_id in self.block_ids:
            self.prefill.release(seq_id)
        await self.prefill.report()  # behind what was posted
        self.gate.open()


async def _pair(prefill: AsyncEngine, decode: AsyncEngine, two: TwoPools, opened: Opened, *, alter_probe: bool = False) -> Paired:
    reader, source, pool = opened.new_reader(), opened.source, two.pool
    start = prefill_pb2.PairStart(
        layout=kv_layout_to_proto(decode.model.layout),
        process_id=PROCESS_ID,
        boot_id=boot_id(),
        transports=[reader.name],
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    reader.greet(start)
    pairing = Pairing(start)
    offer = prefill_pb2.PairResponse(
        pairing_id=pairing.pairing_id,
        layout=kv_layout_to_proto(prefill.model.layout),
        nonce=pairing.nonce,
        num_blocks=pool.memory.num_blocks,
        probe_bytes=len(pool.probe),
        probe_digest=pool.probe_digest,
        sources=[await source.offer(pairing)],
    )
    if alter_probe:
        if opened.alter_probe:
            opened.alter_probe()
        else:
            prefill.kv_cache.probe[-1] ^= 1
    return Paired(pairing, offer, reader)


@asynccontextmanager
async def open_ends(
    name: str,
    *,
    checksum: bool = False,
    chunk_bytes: int = 100,
    max_stop_s: float = 5.0,
    num_blocks: int = 64,
    block_sizes: tuple[int, int] = (4, 4),
    budgets: Sequence[ByteBudget] = (),
) -> AsyncIterator[Ends]:
    """Both ends of a registered kind, started, paired and attached. Blocks are of 128 bytes, so that chunks of 100 straddle them.

    `block_sizes` are prefill's and decode's.
    """
    kind = kinds()[name]
    async with AsyncExitStack() as stack:
        prefill, _ = await stack.enter_async_context(running_fake_engine(num_blocks=num_blocks, block_size=block_sizes[0]))
        decode, _ = await stack.enter_async_context(running_fake_engine(num_blocks=num_blocks, block_size=block_sizes[1]))
        prefill_quarantine, decode_quarantine = Quarantine(max_stop_s=max_stop_s), Quarantine(max_stop_s=max_stop_s)
        gate = Gate()
        executor = GatedThread(gate)
        stack.callback(executor.shutdown)
        two = TwoPools(prefill, decode, HostPool(prefill.kv_cache), Holds(prefill, prefill_quarantine), gate, executor, chunk_bytes)
        opened = await stack.enter_async_context(kind.open(two))
        stack.callback(gate.open)
        paired = await _pair(prefill, decode, two, opened)
        stack.callback(opened.source.withdraw, paired.pairing.pairing_id)
        stack.callback(paired.reader.close)
        await paired.reader.attach(paired.offer, paired.offer.sources[0])
        memory = opened.memory or HostBlocks(decode.kv_cache.blocks)
        parts = PathParts(memory, decode.model.layout, executor, budgets or (ByteBudget(1 << 20), ByteBudget(1 << 22)), checksum)
        path = KvPath(parts, paired.reader, prefill.model.layout, 1e9)
        yield Ends(prefill, decode, two, opened, prefill_quarantine, decode_quarantine, paired, path, checksum)
