"""A device of bench-engine: steps and prompts on a pool of its own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from engine.build import kv_layout
from engine.config import EngineConfig
from engine.describe import describe_decoder
from engine.kernels.build import build_shared_library, default_cache_dir
from engine.kernels.isa import Isa
from engine.kernels.native_decoder import SOURCE, NativeDecoder
from engine.kv_cache import HostKvCache
from engine.model import load_model
from engine.sampling_params import SamplingParams
from engine.step import Chunk, SampleRow, StepPlan
from engine.torch_device import TorchDevice

PREFILL_CHUNK = EngineConfig(Path()).max_prefill_tokens_per_step
_BLOCK_SIZE = 16
_STEP_TIMEOUT_S = 300.0
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds of what comes before the first step."""

    load_s: float
    pack_s: float
    compile_s: float | None
    """Of the native code, once a machine; None where it was not measured."""

    def row(self) -> dict[str, float | None]:
        """For a file."""
        return {name: None if value is None else round(value, 2) for name, value in asdict(self).items()}


def measure_startup(model: Path, threads: int, *, cold: bool) -> Startup:
    """Loads and packs a model that the page cache has, with code that is compiled already; `cold` compiles it once more, elsewhere."""
    build_shared_library(SOURCE, default_cache_dir(), "c++")
    load_model(model, "bfloat16", "cpu")
    started = time.perf_counter()
    loaded = load_model(model, "bfloat16", "cpu")
    loaded_at = time.perf_counter()
    NativeDecoder(describe_decoder(loaded.module), threads, default_cache_dir(), "c++").close()
    packed_at = time.perf_counter()
    compile_s = None
    if cold:
        with tempfile.TemporaryDirectory() as scratch:
            started_compiling = time.perf_counter()
            build_shared_library(SOURCE, Path(scratch), "c++")
            compile_s = time.perf_counter() - started_compiling
    return Startup(loaded_at - started, packed_at - loaded_at, compile_s)


class Bench:
    """One device and its pool. KV of a sequence's context is whatever the pool holds: what it says costs no time."""

    def __init__(self, device: TorchDevice, num_blocks: int, vocab_size: int, weight_bytes: int) -> None:
        """`device` has `num_blocks` blocks."""
        self.num_blocks = num_blocks
        self.weight_bytes = weight_bytes
        self.batch_invariant = device.batch_invariant
        self._device = device
        self._random = np.random.default_rng(0)
        self._vocab_size = vocab_size

    @classmethod
    @contextmanager
    def opened(cls, model: Path, threads: int, pool_gib: float, *, isa: Isa | None = "native", native: bool = True) -> Iterator[Bench]:
        """By code for `isa`, or by transformers' module where not `native`."""
        loaded = load_model(model, "bfloat16", "cpu")
        config = EngineConfig(model, dtype="bfloat16", num_threads=threads, block_size=_BLOCK_SIZE, forward="native" if native else "module")
        layout = kv_layout(loaded, _BLOCK_SIZE)
        kv_cache = HostKvCache(layout, int(pool_gib * (1 << 30)) // layout.block_bytes)
        decoder = NativeDecoder(describe_decoder(loaded.module), threads, default_cache_dir(), "c++", isa or "native") if native else None
        weight_bytes = sum(each.nbytes for each in loaded.module.parameters()) if decoder is None else decoder.num_weight_bytes
        device = TorchDevice(config, replace(loaded, module=None) if native else loaded, kv_cache, decoder)
        try:
            yield cls(device, kv_cache.num_blocks, loaded.vocab_size, weight_bytes)
        finally:
            device.close()
            kv_cache.close()

    @staticmethod
    def blocks_of(num_tokens: int) -> int:
        """That so many tokens need."""
        return -(-num_tokens // _BLOCK_SIZE)

    def step_s(self, batch: int, context: int) -> float:
        """A step of one token of each sequence, and a sample of it."""
        tables = self._tables(batch, self.blocks_of(context + 1))
        tokens = self._tokens(batch)
        rows = (SampleRow(_GREEDY, context + 1, (), 0),)
        return self._run([Chunk(str(index), tokens[index : index + 1], context, table, rows) for index, table in enumerate(tables)])

    def prompt_s(self, length: int) -> float:
        """A prompt, in chunks, and a sample of its last token."""
        [table] = self._tables(1, self.blocks_of(length))
        tokens, seconds = self._tokens(length), 0.0
        for first in range(0, length, PREFILL_CHUNK):
            end = min(first + PREFILL_CHUNK, length)
            rows = (SampleRow(_GREEDY, length, (), length),) if end == length else ()
            seconds += self._run([Chunk("prompt", tokens[first:end], first, table, rows)])
        return seconds

    def _tokens(self, count: int) -> list[int]:
        return [int(token_id) for token_id in self._random.integers(0, self._vocab_size, count)]

    def _tables(self, count: int, length: int) -> list[list[int]]:
        blocks = self._random.permutation(self.num_blocks)[: count * length].reshape(count, length)
        return [[int(block) for block in table] for table in blocks]

    def _run(self, chunks: list[Chunk]) -> float:
        started = time.perf_counter()
        result = self._device.launch(StepPlan(0, chunks)).result(_STEP_TIMEOUT_S)
        seconds = time.perf_counter() - started
        assert not result.failed, result.failed
        return seconds
