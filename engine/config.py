"""What an engine is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from engine.errors import EngineError
from engine.limits import EngineLimits, PolicyName
from engine.policies import POLICIES

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackendName = Literal["auto", "native", "torch"]
ForwardName = Literal["auto", "native", "module"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICES = ("cpu",)
_ATTENTION_BACKENDS = ("auto", "native", "torch")
_VARIANT_BACKENDS = ("torch",)
_FORWARDS = ("auto", "native", "module")
_OF_POLICIES = ("prefill_quota", "max_decode_steps")


class ConfigError(EngineError):
    """A value that an engine cannot start with; `field` is its name in `EngineConfig`."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know; raises ConfigError, naming the field, for a value that cannot work."""

    model: Path
    """Directory with config.json and safetensors files."""
    dtype: Dtype = "auto"
    """Type of weights and KV cache; "auto" takes the checkpoint's own."""
    device: str = "cpu"
    """Where the model runs."""
    block_size: int = 16
    """Tokens in a KV block."""
    num_blocks: int | None = None
    """Blocks in the KV pool; None sizes the pool by `kv_cache_memory`."""
    kv_cache_memory: int | None = None
    """Bytes of the KV pool; None, without `num_blocks`, sizes it by `gpu_memory_utilization`."""
    gpu_memory_utilization: float | None = None
    """The share of the device's memory, on CPU of the memory available at the start, that the process may take: weights, activations, reserve and KV.

    Given without a size of the pool, the pool takes all that is left of it. None is 0.9, and on CPU, where other services live on the same memory, a pool
    that nobody sized is of at most 1 GiB, or of what `max_model_len` needs if that is given and more.
    """
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and output; None takes the model's own limit, cut to what the pool holds."""
    max_num_seqs: int = 64
    """Most sequences that compute or wait for KV at a time."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step, prefill and decode."""
    max_prefill_tokens_per_step: int = 512
    """Part of `max_num_batched_tokens` that prefill may take."""
    scheduling_policy: PolicyName = "fifo"
    """Whose prompt comes next, and how much of a step prompts may take: fifo, shortest, decode-first or quota."""
    prefill_quota: int = 128
    """Of quota: prompt tokens of a step while others decode."""
    prefill_aging: float = 1.0
    """Of shortest: tokens that a prompt gains on shorter ones for each prompt token that is computed while it waits."""
    max_decode_steps: int = 64
    """Of decode-first: steps in which prompts wait for those that decode."""
    enable_prefix_caching: bool = True
    """Keep the KV of ended sequences and reuse it for equal prefixes."""
    reserve_output_tokens: int = 256
    """Output tokens for which blocks are reserved with a prompt whose KV comes from elsewhere."""
    attention_backend: AttentionBackendName = "auto"
    """"native" is compiled at first use; "torch" is the reference; "auto" is native where a compiler is, else torch, and says which."""
    forward: ForwardName = "auto"
    """On CPU: "native" computes a step in one call, batch-invariant; "module" runs transformers' layers; "auto" is native where it knows the model."""
    batch_invariant: bool = False
    """Promise one order of sums for each token whatever its batch and however its prompt is cut, or refuse to start; False takes what is fastest.

    On CPU the native forward always keeps one; on CUDA products and attention then run on kernels that do.
    """
    num_threads: int | None = None
    """CPU threads of one step; None leaves torch's own choice."""
    max_stall_s: float = 60.0
    """Seconds without progress after which a busy engine counts as dead."""
    cache_dir: Path | None = None
    """Where compiled kernels are kept; None is `.cache/tandem` in the user's home."""
    compiler: str = "c++"
    """C++ compiler of the native kernel, a command or a path."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, _DTYPES)
        _one_of("device", self.device, _DEVICES)
        _one_of("attention_backend", self.attention_backend, _ATTENTION_BACKENDS)
        _one_of("forward", self.forward, _FORWARDS)
        if self.forward == "native" and self.attention_backend == "torch":
            raise ConfigError("forward", "native has its own attention: it cannot run with attention_backend torch")
        if self.batch_invariant and self.attention_backend in _VARIANT_BACKENDS:
            raise ConfigError("batch_invariant", f"attention_backend {self.attention_backend} sums by the batch; take auto")
        _one_of("scheduling_policy", self.scheduling_policy, tuple(POLICIES))
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens_per_step", "reserve_output_tokens", *_OF_POLICIES):
            _at_least_one(field, getattr(self, field))
        for field in ("num_blocks", "kv_cache_memory", "max_model_len", "num_threads"):
            if getattr(self, field) is not None:
                _at_least_one(field, getattr(self, field))
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_blocks", "give num_blocks or kv_cache_memory, not both: each sizes the KV pool")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization", f"{self.gpu_memory_utilization} is not above 0 and at most 1")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError("max_num_seqs", f"{self.max_num_seqs} sequences do not fit a step of max_num_batched_tokens = {self.max_num_batched_tokens}")
        if self.max_prefill_tokens_per_step > self.max_num_batched_tokens:
            raise ConfigError(
                "max_prefill_tokens_per_step", f"{self.max_prefill_tokens_per_step} is more than max_num_batched_tokens = {self.max_num_batched_tokens}"
            )
        if not self.prefill_aging > 0:
            raise ConfigError("prefill_aging", f"{self.prefill_aging} is not above 0: a prompt could wait for ever")
        if not self.max_stall_s > 0:
            raise ConfigError("max_stall_s", f"{self.max_stall_s} is not above zero")

    @property
    def limits(self) -> EngineLimits:
        """The scheduler's part."""
        return EngineLimits(**{field.name: getattr(self, field.name) for field in fields(EngineLimits)})


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(field, f"{value!r} is unknown; one of {', '.join(allowed)}")


def _at_least_one(field: str, value: int) -> None:
    if value < 1:
        raise ConfigError(field, f"{value} is below 1")
