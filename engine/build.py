"""Makes a whole engine from a model directory: the one place where scheduler and torch meet."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import chain

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.facts import ModelFacts
from engine.forward import native_decoder
from engine.host_memory import available_memory_bytes, peak_memory_bytes
from engine.kernels.native_decoder import NativeDecoder
from engine.kv_cache import HostKvCache, KvLayout
from engine.model import LoadedModel, load_model
from engine.pool_size import check_model_len, memory_bill, served_model_len
from engine.profiling import LargestStep
from engine.step import StepResult
from engine.torch_device import TorchDevice

_log = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> AsyncEngine:
    """Loads the model, sizes the pool and returns an engine that is not yet started.

    Takes seconds and blocks: call it before a loop serves anybody. Raises ConfigError, ModelError or UnsupportedModelError, all of which a user can cause.
    """
    facts, kv_cache, device = build_torch_engine_parts(config)
    return AsyncEngine(Engine(facts, config.limits, device, num_blocks=kv_cache.num_blocks, generations=kv_cache.generations), kv_cache)


def build_torch_engine_parts(config: EngineConfig) -> tuple[ModelFacts, HostKvCache, TorchDevice]:
    """Loads the model, runs one largest step to see what it takes, and makes pool and device; takes seconds, so call it off the event loop.

    Raises ModelError, KernelBuildError, or ConfigError with the arithmetic when the bill does not fit memory or a sequence of `max_model_len` the pool.
    """
    available_bytes = available_memory_bytes()
    model = load_model(config.model, config.dtype, config.device)
    weight_bytes = _weight_bytes(model)
    native = native_decoder(config, model)
    if native is not None:
        model, weight_bytes = replace(model, module=None), native.num_weight_bytes  # its weights are packed: no second copy stays
    check_model_len(config, model.max_position_embeddings)
    layout = kv_layout(model, config.block_size)
    activation_bytes = _activation_bytes(config, model, layout, native)
    bill = memory_bill(config, layout, available_bytes=available_bytes, weight_bytes=weight_bytes, activation_bytes=activation_bytes)
    for line in bill.lines():
        _log.info("memory: %s", line)
    max_model_len = served_model_len(config, model.max_position_embeddings, bill.num_blocks)
    kv_cache = HostKvCache(layout, bill.num_blocks)
    facts = ModelFacts(model.name, model.vocab_size, model.eos_token_ids, max_model_len, layout)
    device = TorchDevice(config, model, kv_cache, native)
    _log.info("forward %s, attention %s, %s, batch-invariant: %s", device.forward, device.attention_backend, layout.dtype, device.batch_invariant)
    return facts, kv_cache, device


def kv_layout(model: LoadedModel, block_size: int) -> KvLayout:
    """Layout of a pool for this model."""
    return KvLayout(model.fingerprint, model.dtype_name, model.num_layers, model.num_kv_heads, model.head_dim, block_size)


def _activation_bytes(config: EngineConfig, model: LoadedModel, layout: KvLayout, native: NativeDecoder | None) -> int:
    """Peak of the largest step on CPU, the sampler's part in it; see engine.profiling."""
    step = LargestStep(config.limits, block_size=config.block_size, vocab_size=model.vocab_size, max_positions=model.max_position_embeddings)
    started_s = time.monotonic()
    kv_cache = HostKvCache(layout, step.num_blocks)
    device = TorchDevice(config, model, kv_cache, native)
    try:
        device.launch(step.first_plan()).result()
        results: list[StepResult] = []
        num_bytes = peak_memory_bytes(lambda: results.append(device.launch(step.plan()).result()))
    finally:
        device.close()
        kv_cache.close()
    for error in results[0].failed.values():
        _log.warning("a part of the profiled step failed, so that the bill may be too small: %s", error)
        break
    _log.info("profiled a step of %d tokens in %.1f s", step.num_tokens, time.monotonic() - started_s)
    return num_bytes


def _weight_bytes(model: LoadedModel) -> int:
    """Parameters and buffers, tied ones once."""
    tensors = {tensor.data_ptr(): tensor for tensor in chain(model.module.parameters(), model.module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
