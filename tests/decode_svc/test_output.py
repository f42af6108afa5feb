"""What a Generate RPC sends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from decode_svc.attempt import HandoverAttempt
from decode_svc.computed_prompt import ComputedPrompt, FirstToken
from decode_svc.decode_span import DecodeSpan
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.output import Output
from engine.sampling_params import Finish, FinishReason, SampledToken
from tandem.v1 import decode_pb2, generation_pb2, prefill_pb2
from telemetry.metrics import WorkerMetrics


class _Written:
    """A context that keeps what is written to it."""

    def __init__(self) -> None:
        self.messages: list[decode_pb2.DecodeServiceGenerateResponse] = []

    async def write(self, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
        self.messages.append(message)


def _output(*, num_samples: int = 1, output_token_ids: tuple[int, ...] = ()) -> tuple[Output, list[decode_pb2.DecodeServiceGenerateResponse]]:
    context: Any = _Written()
    return Output(context, num_samples=num_samples, output_token_ids=output_token_ids), context.messages


async def test_what_piled_up_for_a_slow_reader_goes_out_in_bounded_messages() -> None:
    output, messages = _output(output_token_ids=(7, 8, 9))
    prompt = decode_pb2.PromptReport(path=decode_pb2.PROMPT_PATH_LOCAL)
    await output.send(0, [SampledToken(each) for each in range(600)], prompt=prompt, finish=Finish(FinishReason.LENGTH))
    assert [len(message.token_ids) for message in messages] == [256, 256, 88]
    assert [message.position for message in messages] == [3, 259, 515]
    assert [7, 8, 9, *(token for message in messages for token in message.token_ids)] == output.token_ids[0] == [7, 8, 9, *range(600)]
    assert [message.HasField("prompt") for message in messages] == [True, False, False]
    assert [message.HasField("finish") for message in messages] == [False, False, True]


async def test_each_sample_has_positions_and_a_finish_of_its_own() -> None:
    output, messages = _output(num_samples=2)
    for index, token in ((0, 1), (1, 2), (1, 3)):
        await output.send(index, [SampledToken(token)])
    await output.send(1, [], finish=Finish(FinishReason.STOP))
    await output.send(0, [SampledToken(4)], finish=Finish(FinishReason.LENGTH))
    assert [(message.index, message.position, *message.token_ids) for message in messages] == [(0, 0, 1), (1, 0, 2), (1, 1, 3), (1, 2), (0, 1, 4)]
    assert (output.token_ids, output.ended) == (([1, 4], [2, 3]), {0, 1})


async def test_a_reservation_is_told_again_only_when_it_is_another_one_and_never_behind_a_token() -> None:
    output, messages = _output()
    for charged in (0, 0, 5, 5):
        await output.reservation(num_charged_blocks=charged, num_blocks=charged, cached_tokens=0)
    await output.send(0, [SampledToken(1)])
    await output.reservation(num_charged_blocks=7, num_blocks=7, cached_tokens=0)
    assert [message.reservation.num_charged_blocks for message in messages if message.HasField("reservation")] == [0, 5]


async def test_of_several_hand_overs_only_the_first_is_reported() -> None:
    output, messages = _output(num_samples=2)
    for index in range(2):
        output.handed_over(decode_pb2.HandoverReport(num_blocks=5 - index))
        await output.send(index, [SampledToken(1)])
    assert [message.handover.num_blocks for message in messages if message.HasField("handover")] == [5]


async def test_prompt_log_probabilities_go_out_in_bounded_messages() -> None:
    output, messages = _output()
    await output.prompt_logprobs([generation_pb2.TokenLogprob(token_id=each) for each in range(600)])
    assert [len(message.prompt_logprobs) for message in messages] == [256, 256, 88]
    assert [entry.token_id for message in messages for entry in message.prompt_logprobs] == list(range(600))


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
async def test_first_tokens_on_their_way_count_as_sent_when_prefill_ends_the_call(failure: BaseException) -> None:
    """grpc.aio raises CancelledError also for a call that its peer ended with CANCELLED."""
    context = _Slow()
    output = Output(context, num_samples=2)  # type: ignore[arg-type]
    pool: Any = SimpleNamespace(metrics=WorkerMetrics("m", "decode", CollectorRegistry()))
    attempt: Any = object.__new__(HandoverAttempt)
    attempt._rpc = GenerateRpc(pool, context, output, "p0")  # type: ignore[arg-type]
    attempt._report = decode_pb2.PromptReport(path=decode_pb2.PROMPT_PATH_HANDOVER)
    first = tuple(FirstToken(index, (SampledToken(7 + index),), None) for index in range(2))
    computed = ComputedPrompt(prefill_pb2.PrefillDone(), first, [], 0)

    async def confirmed(*_: object) -> None:
        await context.out.wait()
        asyncio.get_running_loop().call_soon(context.let_go.set)
        raise failure

    call: Any = SimpleNamespace(cancel=lambda: None)
    with pytest.raises(type(failure)):
        await asyncio.wait_for(attempt._send_and_confirm(call, SimpleNamespace(confirmed=confirmed), computed, DecodeSpan(None)), 5)
    assert output.token_ids == ([7], [8])
