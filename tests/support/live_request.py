"""A request on its way through real services, as its client sees it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import grpc

from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2

_POLL_S = 0.005


def request_of(prompt: Iterable[int], *, request_id: str = "", **params: Any) -> gateway_pb2.GenerateRequest:
    """A request in tokens; `params` as of SamplingParams, greedy and not ended by a token by default."""
    sampling = generation_pb2.SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "seed": 1} | params)
    return gateway_pb2.GenerateRequest(request_id=request_id, token_ids=generation_pb2.TokenIds(ids=prompt), sampling_params=sampling)


class LiveRequest:
    """Begins at once. A status is a result, not an exception."""

    def __init__(self, stub: gateway_pb2_grpc.GatewayServiceStub, request: gateway_pb2.GenerateRequest, timeout_s: float) -> None:
        self.request_id = request.request_id
        self.samples: defaultdict[int, list[int]] = defaultdict(list)
        """Token ids by sample."""
        self.token_ids = self.samples[0]
        """The first one's."""
        self.logprobs: list[generation_pb2.TokenLogprob] = []
        self.text = ""
        self.finish = generation_pb2.Finish()
        self.usage = generation_pb2.Usage()
        self.num_messages = 0
        self.started_s = time.monotonic()
        self.first_token_s = 0.0
        self.ended_s = 0.0
        self.code: grpc.StatusCode | None = None
        self.status: StatusError | None = None
        """What it ended with, when that was an error from a server or the channel."""
        self.trailers: dict[str, str] = {}
        self._call = stub.Generate(request, timeout=timeout_s)
        self._task = asyncio.create_task(self._run())

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_token_s - self.started_s

    @property
    def outcome(self) -> tuple[str, str]:
        """Code and reason."""
        return (self.code.name if self.code else "RUNNING", self.status.reason if self.status else "")

    def cancel(self) -> None:
        """The client leaves."""
        self._call.cancel()

    async def ended(self, within_s: float = 30.0) -> LiveRequest:
        """Waits for the end, whatever it is."""
        async with asyncio.timeout(within_s):
            await asyncio.wait({self._task})
        self._task.result()
        return self

    async def tokens(self, count: int, within_s: float = 30.0) -> None:
        """Waits until the client has this many tokens."""
        async with asyncio.timeout(within_s):
            while len(self.token_ids) < count:
                assert self.code is None, f"it ended {self.outcome} with {len(self.token_ids)} tokens"
                await asyncio.sleep(_POLL_S)

    async def _run(self) -> None:
        try:
            async for message in self._call:
                self._take(message)
            self.code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            self.code, self.status = error.code(), StatusError.of(error)
        except asyncio.CancelledError:
            self.code = grpc.StatusCode.CANCELLED
        self.ended_s = time.monotonic()
        self.trailers = {key: str(value) for key, value in (await self._call.trailing_metadata() or ()) if key.startswith("tandem-")}

    def _take(self, message: gateway_pb2.GenerateResponse) -> None:
        self.num_messages += 1
        self.request_id = message.request_id
        if message.token_ids:
            assert message.position == len(self.samples[message.index]), "positions have a gap"
            self.first_token_s = self.first_token_s or time.monotonic()
        self.samples[message.index].extend(message.token_ids)
        self.logprobs.extend(message.logprobs)
        self.text += message.text
        if message.HasField("finish"):
            self.finish.CopyFrom(message.finish)
        if message.HasField("usage"):
            self.usage.CopyFrom(message.usage)
