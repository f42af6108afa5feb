"""Decode and prefill workers that follow a script, as real gRPC servers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from rpc.server import RpcServer
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2, kv_pb2, load_pb2, prefill_pb2, prefill_pb2_grpc

Request = decode_pb2.DecodeServiceGenerateRequest
Response = decode_pb2.DecodeServiceGenerateResponse
Script = Callable[["FakeDecode", Request, Any], Awaitable[None]]
STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH


def load_report(vocab_size: int, eos: list[int], **fields: Any) -> load_pb2.LoadReport:
    layout = kv_pb2.KvLayout(model_fingerprint="f", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, version=1)
    defaults: dict[str, Any] = {
        "incarnation": "1",
        "ready": True,
        "num_blocks": 1000,
        "num_free_blocks": 1000,
        "block_size": 16,
        "max_model_len": 512,
        "max_num_seqs": 64,
        "reserve_output_tokens": 64,
        "layout": layout,
        "model": "m",
        "vocab_size": vocab_size,
        "eos_token_ids": eos,
    }
    return load_pb2.LoadReport(**{**defaults, **fields})


class Load:
    """A load that watchers follow."""

    def __init__(self, report: load_pb2.LoadReport) -> None:
        self._changed = asyncio.Event()
        self.report = report

    def change(self, **fields: Any) -> None:
        report = load_pb2.LoadReport()
        report.CopyFrom(self.report)
        report.MergeFrom(load_pb2.LoadReport(**fields))
        for name, value in fields.items():
            if isinstance(value, (int, bool)):
                setattr(report, name, value)
        self.report = report
        self._changed.set()
        self._changed = asyncio.Event()

    async def reports(self) -> AsyncIterator[load_pb2.LoadReport]:
        while True:
            changed = self._changed
            yield self.report
            await changed.wait()


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """`script` serves Generate; requests are kept, and how many handlers run is counted."""

    def __init__(self, report: load_pb2.LoadReport, script: Script) -> None:
        self.load = Load(report)
        self.script = script
        self.requests: list[Request] = []
        self.num_running = 0
        self.num_cancelled = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.server = RpcServer("decode")
        self.server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, self, "tandem.v1.DecodeService")

    async def Generate(self, request: Request, context: Any) -> None:
        self.requests.append(request)
        self.num_running += 1
        self.idle.clear()
        try:
            await self.script(self, request, context)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.idle.set()

    async def WatchLoad(self, request: Any, context: Any) -> None:
        async for report in self.load.reports():
            await context.write(decode_pb2.DecodeServiceWatchLoadResponse(load=report))


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Only says how loaded it is."""

    def __init__(self, report: load_pb2.LoadReport) -> None:
        self.load = Load(report)
        self.server = RpcServer("prefill")
        self.server.add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, self, "tandem.v1.PrefillService")

    async def WatchLoad(self, request: Any, context: Any) -> None:
        async for report in self.load.reports():
            await context.write(prefill_pb2.PrefillServiceWatchLoadResponse(load=report))


def says(*messages: Response) -> Script:
    """Sends these and ends."""

    async def script(_: FakeDecode, __: Request, context: Any) -> None:
        for message in messages:
            await context.write(message)

    return script


def tokens(token_ids: list[int], *, per_message: int = 1, finish: generation_pb2.Finish | None = None, first: int = 0, hang: bool = False) -> Script:
    """Reservation, then the tokens; the last message carries `finish` (default LENGTH). `hang`: then nothing more, and no end."""

    async def script(_: FakeDecode, __: Request, context: Any) -> None:
        await context.write(Response(reservation=decode_pb2.Reservation(num_charged_blocks=2, num_blocks=3)))
        for start in range(0, len(token_ids), per_message):
            piece = Response(token_ids=token_ids[start : start + per_message], position=first + start)
            if start == 0:
                piece.prompt.CopyFrom(decode_pb2.PromptReport(path=decode_pb2.PROMPT_PATH_HANDOVER, prefill_instance="p0", cached_tokens=3))
                piece.handover.CopyFrom(decode_pb2.HandoverReport(transport="inline", kv_bytes=4096, num_blocks=2))
            if start + per_message >= len(token_ids) and not hang:
                piece.finish.CopyFrom(finish or generation_pb2.Finish(finish_reason=LENGTH))
            await context.write(piece)
        if hang:
            await asyncio.Event().wait()

    return script


def samples(
    *token_ids: list[int], finish: generation_pb2.Finish | None = None, prompt_logprobs: Sequence[int] = (), hang: frozenset[int] = frozenset()
) -> Script:
    """Several samples, their tokens by turns; `prompt_logprobs` are lengths of messages in front of them. Those in `hang` do not end, nor does the call."""

    async def script(_: FakeDecode, request: Request, context: Any) -> None:
        await context.write(Response(reservation=decode_pb2.Reservation(num_charged_blocks=2, num_blocks=3)))
        told = itertools.chain(request.prompt_token_ids[1:], itertools.repeat(0))
        for length in prompt_logprobs:
            await context.write(Response(prompt_logprobs=[generation_pb2.TokenLogprob(token_id=next(told), logprob=-1.0) for _ in range(length)]))
        for position in range(max(map(len, token_ids))):
            for index, ids in enumerate(token_ids):
                if position < len(ids):
                    piece = Response(index=index, token_ids=[ids[position]], position=position)
                    if position == len(ids) - 1 and index not in hang:
                        piece.finish.CopyFrom(finish or generation_pb2.Finish(finish_reason=LENGTH))
                    await context.write(piece)
        if hang:
            await asyncio.Event().wait()

    return script


def fails(error: Exception, *, after: Script | None = None) -> Script:
    async def script(decode: FakeDecode, request: Request, context: Any) -> None:
        if after is not None:
            await after(decode, request, context)
        raise error

    return script


def waits(until: asyncio.Event, then: Script, *, reached: asyncio.Event | None = None) -> Script:
    async def script(decode: FakeDecode, request: Request, context: Any) -> None:
        if reached is not None:
            reached.set()
        await until.wait()
        await then(decode, request, context)

    return script


async def hangs(_: FakeDecode, __: Request, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Never answers."""
    await asyncio.Event().wait()
