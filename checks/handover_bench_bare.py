"""`python -m checks.handover_bench_bare {serve PORT,ask PORT COUNT} CORE`: the floor of the control path.

A hand-over's conversation with nothing in it: the same messages over the same kind of channel between two processes with a core each, and neither engine,
nor pairing, nor trace. What a hand-over takes beyond it is Tandem's own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import uvloop

from checks.handover_bench_machine import pin
from checks.handover_bench_process import free_port
from kvtransfer.hold import CONFIRMED
from rpc.channels import SERVER_OPTIONS, control_channel
from rpc.process import keep_freed_memory
from tandem.v1 import generation_pb2, kv_pb2, prefill_pb2, prefill_pb2_grpc

_PROMPT_TOKENS = 64
_TIMEOUT_S = 20.0
_WARM_UP = 50
_HOLD = "0" * 32


class BareServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Says what prefill would say, at once."""

    async def Prefill(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """See prefill.proto."""
        await context.send_initial_metadata(())
        await context.read()
        ready = kv_pb2.KvReady(hold_id=_HOLD, num_blocks=4, block_ids=[1, 2, 3, 4], generations=[1, 3, 5, 7])
        await context.write(prefill_pb2.PrefillResponse(kv_ready=ready))
        done = prefill_pb2.PrefillDone(first_tokens=[prefill_pb2.FirstToken(token_id=5)], num_blocks=4, hold_id=_HOLD)
        await context.write(prefill_pb2.PrefillResponse(done=done))
        await context.read()
        context.set_trailing_metadata(((CONFIRMED, _HOLD),))


async def _serve(port: int) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(BareServicer(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


async def _ask(port: int, count: int) -> None:
    sampling = generation_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=1)
    start = prefill_pb2.PrefillStart(request_id="bare", prompt_token_ids=[7] * _PROMPT_TOKENS, sampling_params=sampling, transport="shared_memory")
    elapsed: list[float] = []
    async with control_channel(f"127.0.0.1:{port}") as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        for _ in range(_WARM_UP + count):
            started = time.perf_counter()
            await _talk(stub, start)
            elapsed.append(time.perf_counter() - started)
            await asyncio.sleep(0.001)  # requests come one behind the other, and not on top of each other's last spans
    print(json.dumps({"median_s": statistics.median(elapsed[_WARM_UP:])}))


async def _talk(stub: prefill_pb2_grpc.PrefillServiceStub, start: prefill_pb2.PrefillStart) -> None:
    call = stub.Prefill(timeout=_TIMEOUT_S, wait_for_ready=True)
    await call.write(prefill_pb2.PrefillRequest(start=start))
    assert (await call.read()).HasField("kv_ready")
    assert (await call.read()).HasField("done")
    await call.write(prefill_pb2.PrefillRequest(copied=prefill_pb2.Copied(hold_id=_HOLD, num_blocks=4)))
    assert await call.read() is grpc.aio.EOF


async def measure(cores: tuple[int, int], count: int) -> float:
    """Median seconds of the whole conversation, prefill's side on the first core. Raises RuntimeError."""
    port = free_port()
    async with AsyncExitStack() as stack:
        server = await asyncio.create_subprocess_exec(*_command("serve", port, cores[0]), stdin=asyncio.subprocess.PIPE)
        stack.push_async_callback(_end, server)
        client = await asyncio.create_subprocess_exec(*_command("ask", port, cores[1], count), stdout=asyncio.subprocess.PIPE)
        stack.push_async_callback(_end, client)
        output, _ = await asyncio.wait_for(client.communicate(), _TIMEOUT_S)
        if client.returncode:
            raise RuntimeError(f"the bare conversation ended with {client.returncode}")
        median_s: float = json.loads(output)["median_s"]
        return median_s


def _command(role: str, port: int, core: int, *more: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "checks.handover_bench_bare", role, str(port), str(core), *map(str, more))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def main() -> None:
    """Runs one side."""
    role, port, core, *more = sys.argv[1:]
    pin([int(core)])
    keep_freed_memory()
    uvloop.run(_serve(int(port)) if role == "serve" else _ask(int(port), int(more[0])))


if __name__ == "__main__":
    main()
