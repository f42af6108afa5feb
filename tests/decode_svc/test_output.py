"""What a Generate RPC sends."""

from __future__ import annotations

from typing import Any

from decode_svc.output import Output
from engine.sampling_params import Finish, FinishReason, SampledToken
from tandem.v1 import decode_pb2


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
