"""What a Generate RPC sends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from decode_svc.attempt import HandoverAttempt
from decode_svc.output import Output
from decode_svc.tokens import DecodeSpan
from engine.sampling_params import Finish, FinishReason, SampledToken
from tandem.v1 import decode_pb2
from telemetry.metrics import WorkerMetrics


class _Written:
    """A context that keeps what is written to it."""

    def __init__(self) -> None:
        self.messages: list[decode_pb2.DecodeServiceGenerateResponse] = []

    async def write(self, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
        self.messages.append(message)


def _output(position: int = 0) -> tuple[Output, list[decode_pb2.DecodeServiceGenerateResponse]]:
    context: Any = _Written()
    return Output(context, position), context.messages


async def test_what_piled_up_for_a_slow_reader_goes_out_in_bounded_messages() -> None:
    output, messages = _output(position=3)
    prompt = decode_pb2.PromptReport(path=decode_pb2.PROMPT_PATH_LOCAL)
    await output.send([SampledToken(each) for each in range(600)], prompt=prompt, finish=Finish(FinishReason.LENGTH))
    assert [len(message.token_ids) for message in messages] == [256, 256, 88]
    assert [message.position for message in messages] == [3, 259, 515]
    assert [token for message in messages for token in message.token_ids] == output.token_ids == list(range(600))
    assert [message.HasField("prompt") for message in messages] == [True, False, False]
    assert [message.HasField("finish") for message in messages] == [False, False, True]


async def test_a_reservation_is_told_again_only_when_it_is_another_one() -> None:
    output, messages = _output()
    for charged in (0, 0, 5, 5):
        await output.reservation(num_charged_blocks=charged, num_blocks=charged, cached_tokens=0)
    assert [message.reservation.num_charged_blocks for message in messages] == [0, 5]


class _Slow(_Written):
    """A context whose writes are out at once and return only when `let_go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.out = asyncio.Event()
        self.let_go = asyncio.Event()

    async def write(self, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
        await super().write(message)
        self.out.set()
        await self.let_go.wait()


@pytest.mark.parametrize("failure", [asyncio.CancelledError(), RuntimeError("prefill is gone")])
async def test_a_first_token_on_its_way_counts_as_sent_when_prefill_ends_the_call(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc.aio raises CancelledError also for a call that its peer ended with CANCELLED."""
    context = _Slow()
    attempt: Any = object.__new__(HandoverAttempt)
    attempt._pool = SimpleNamespace(metrics=WorkerMetrics("m", "decode", CollectorRegistry()))
    attempt._output = output = Output(context, 0)  # type: ignore[arg-type]
    attempt._report = decode_pb2.PromptReport(path=decode_pb2.PROMPT_PATH_HANDOVER)

    async def confirm(*_: object) -> None:
        await context.out.wait()
        asyncio.get_running_loop().call_soon(context.let_go.set)
        raise failure

    monkeypatch.setattr(HandoverAttempt, "_confirm", confirm)
    with pytest.raises(type(failure)):
        await asyncio.wait_for(attempt._send_and_confirm(None, None, None, SampledToken(7), DecodeSpan(None)), 5)
    assert output.token_ids == [7]
