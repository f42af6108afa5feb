"""A real decode worker with a real model, and two prefill instances of it: a real one, and one that has every prompt's KV at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from checks.handover_bench_machine import MIB
from checks.handover_bench_pool import model_layout
from checks.handover_bench_process import free_port, nixl_for, running_service, transport_flags
from checks.handover_bench_source import PrefillProcess, PrefillWish, running_prefill
from cli.service_process import ServiceSpec
from rpc.channels import control_channel
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2

HANDOVER_MIB = 512
REAL, INSTANT = "real", "instant"
"""The two prefill instances."""
MAX_MODEL_LEN = 8192
NUM_STREAMS = 4
_RESERVE_TOKENS = 16
_DTYPE, _BLOCK_SIZE = "bfloat16", 16
_COMMON = (
    *(f"--dtype={_DTYPE}", f"--block-size={_BLOCK_SIZE}", "--num-threads=1"),
    *(f"--max-model-len={MAX_MODEL_LEN}", f"--reserve-output-tokens={_RESERVE_TOKENS}"),
)
_REAL_BLOCKS = 600


@dataclass(frozen=True, slots=True)
class Served:
    """The running workers."""

    transport: str
    decode: decode_pb2_grpc.DecodeServiceStub
    decode_pid: int
    real_pid: int
    instant: PrefillProcess
    handover_bytes: int
    """Of all prompts of `prompt_tokens` together: HANDOVER_MIB."""
    prompt_tokens: Sequence[int]

    async def generate(self, request_id: str, prompt: Sequence[int], instance: str, *, max_tokens: int, timeout_s: float) -> decode_pb2.HandoverReport:
        """Runs a request to its end. Raises RuntimeError when it was not handed over by this transport."""
        found = decode_pb2.HandoverReport()
        async for response in self.decode.Generate(request_of(request_id, prompt, instance, max_tokens=max_tokens), timeout=timeout_s):
            if response.HasField("handover"):
                found.CopyFrom(response.handover)
        if found.transport != self.transport:
            raise RuntimeError(f"{request_id} was handed over by {found.transport or 'no transport'}, not by {self.transport}")
        return found


def request_of(request_id: str, prompt: Sequence[int], instance: str, *, max_tokens: int) -> decode_pb2.DecodeServiceGenerateRequest:
    """Greedy, whatever the tokens are; an empty instance is decode itself."""
    sampling = generation_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=1)
    return decode_pb2.DecodeServiceGenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=sampling, prefill_instance=instance)


@asynccontextmanager
async def running_workers(model: Path, transport: str, cores: Sequence[int], socket_dir: Path, log: Path) -> AsyncIterator[Served]:
    """Starts all of them; they may use all cores as long as nobody pins them."""
    layout = model_layout(model, _DTYPE, _BLOCK_SIZE)
    num_blocks = -(-HANDOVER_MIB * MIB // layout.block_bytes)

    def spec(kind: str, *arguments: str) -> ServiceSpec:
        port = free_port()
        flags = ("--host=127.0.0.1", f"--port={port}", f"--model={model}", "--metrics-port=-1", *_COMMON, *transport_flags(transport, socket_dir), *arguments)
        return ServiceSpec(kind, f"{kind}_svc", f"tandem.v1.{kind.capitalize()}Service", port, flags)

    async with AsyncExitStack() as stack:
        instant = await stack.enter_async_context(
            running_prefill(PrefillWish(layout, num_blocks + 64, cores, socket_dir, confirm=False, nixl=nixl_for(transport)))
        )
        real = spec("prefill", f"--num-blocks={_REAL_BLOCKS}")
        instances = f"--prefill={REAL}={real.address},{INSTANT}={instant.address}"
        room = f"--num-blocks={num_blocks + NUM_STREAMS * 128 + 256}"
        decode = spec("decode", room, "--no-enable-prefix-caching", f"--kv-transports={transport}", instances)
        async with asyncio.TaskGroup() as starting:  # loading takes seconds, in each
            processes = [starting.create_task(stack.enter_async_context(running_service(one, log))) for one in (real, decode)]
        channel = await stack.enter_async_context(control_channel(decode.address))
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        prompts = [blocks * _BLOCK_SIZE for blocks in _split(num_blocks)]
        yield Served(transport, stub, processes[1].result().pid, processes[0].result().pid, instant, num_blocks * layout.block_bytes, prompts)


def _split(num_blocks: int) -> list[int]:
    """Blocks of each of as few prompts as the model's length allows."""
    most = (MAX_MODEL_LEN - _RESERVE_TOKENS) // _BLOCK_SIZE
    count = -(-num_blocks // most)
    return [num_blocks * (index + 1) // count - num_blocks * index // count for index in range(count)]
