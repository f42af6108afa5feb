"""Settings that prefill and decode workers share; names as vLLM's where the meaning is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from engine.config import AttentionBackendName, ConfigError, Dtype, EngineConfig, ForwardName
from engine.limits import PolicyName
from rpc.errors import StartupError
from rpc.settings import ServiceSettings, flag_of

Positive = Annotated[int, Field(ge=1)]


class WorkerSettings(ServiceSettings):
    """A worker's engine."""

    model: Path
    """Directory of the model: config.json and safetensors files."""
    served_model_name: str = ""
    """Name of the model in metrics and load reports; default: the directory's name."""
    dtype: Dtype = "auto"
    """Type of weights and KV cache; auto takes the checkpoint's own."""
    block_size: Positive = 16
    """Tokens in a KV block."""
    num_blocks: Positive | None = None
    """Blocks in the KV pool, in place of --kv-cache-memory."""
    kv_cache_memory: ByteSize | None = None
    """Size of the KV pool: bytes, or with a unit as 512MiB, 4GiB (powers of 1024) or 4GB, 4G (powers of 1000); default: by --gpu-memory-utilization."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the device's memory (on CPU: of the memory available at the start) that the worker may take; the KV pool, if no other flag sizes it, takes all
    that is left of it. Default: 0.9, and on CPU a pool of 1 GiB, or of what --max-model-len needs if that is more: other services live there too."""
    max_model_len: Positive | None = None
    """Longest prompt plus output in tokens; default: the model's own limit, cut to what the pool holds."""
    max_num_seqs: Positive = 64
    """Most sequences in one step."""
    max_num_batched_tokens: Positive = 2048
    """Most tokens in one step."""
    max_prefill_tokens_per_step: Positive = 512
    """Of which prompt tokens."""
    scheduling_policy: PolicyName = "fifo"
    """Whose prompt comes next: fifo; shortest (first, with aging); decode-first (prompts only while nothing decodes); quota (--prefill-quota a step)."""
    prefill_quota: Positive = 128
    """Of quota: prompt tokens of a step while others decode."""
    prefill_aging: Annotated[float, Field(gt=0)] = 1.0
    """Of shortest: tokens that a prompt gains on shorter ones for each prompt token that is computed while it waits."""
    max_decode_steps: Positive = 64
    """Of decode-first: steps in which prompts wait for those that decode."""
    max_active_requests: Positive = 1024
    """Most requests that the worker has in hand, waiting ones included; more are refused with RESOURCE_EXHAUSTED."""
    reserve_output_tokens: Positive = 256
    """Output tokens that a reservation counts for."""
    enable_prefix_caching: bool = True
    """Reuse the KV of equal prefixes."""
    attention_backend: AttentionBackendName = "auto"
    """native is compiled at first use, torch is the reference, auto takes the best that works and says which."""
    forward: ForwardName = "auto"
    """On CPU: native computes a step in one call, module runs transformers' layers, auto is native where it knows the model and says which."""
    batch_invariant: bool = False
    """Equal prompts and seeds give equal tokens whatever else is computed and however prompts are cut, or the worker does not start. On CPU --forward native
    always gives it, in every dtype; on CUDA it takes kernels that keep one order of sums and are slower."""
    cache_dir: Path | None = None
    """Where compiled kernels are kept; default: .cache/tandem in the user's home."""
    compiler: str = "c++"
    """C++ compiler of the native kernel, a command or a path."""
    num_threads: Positive | None = None
    """CPU threads of one step; default: torch's choice."""
    max_stall_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds without progress after which a busy worker ends itself."""
    max_reader_stop_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds after which a reader of KV memory that was told to stop and has not is an alarm."""

    nixl_net_devices: str = ""
    """Network interfaces and RDMA ports that NIXL may use, as eth0 or mlx5_0:1 (UCX_NET_DEVICES); default: NIXL is not used. It listens there for everybody who
    can connect, without authentication and in the clear: only on a network of its own."""
    nixl_tls: str = ""
    """Transports of UCX that NIXL may use, as rc,tcp (UCX_TLS); default: UCX's choice."""
    nixl_direction: Literal["auto", "read", "write"] = "auto"
    """How NIXL moves KV: read, decode reads prefill's pool (RDMA); write, prefill writes into a staging region of decode's (TCP); auto, the faster one."""

    def engine_config(self) -> EngineConfig:
        """Raises StartupError that names the flag."""
        try:
            return EngineConfig(**{name: getattr(self, name) for name in _ENGINE_FIELDS})
        except ConfigError as error:
            raise StartupError(f"{flag_of(error.field)}: {str(error).removeprefix(f'{error.field}: ')}") from None


_ENGINE_FIELDS = (
    "model",
    "dtype",
    "block_size",
    "num_blocks",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_tokens_per_step",
    "scheduling_policy",
    "prefill_quota",
    "prefill_aging",
    "max_decode_steps",
    "reserve_output_tokens",
    "enable_prefix_caching",
    "attention_backend",
    "forward",
    "batch_invariant",
    "cache_dir",
    "compiler",
    "num_threads",
    "max_stall_s",
)
