"""A stream of the real gateway that is cut anywhere and gone on with: the joined text and tokens are the uncut one's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.served_model import ServedModel
from tandem.v1 import decode_pb2, generation_pb2
from tandem_client import FinishReason, RetryPolicy
from tests.gateway.fake_decode import FakeDecode, Request, Response, Script
from tests.gateway.house import House, house
from tests.tandem_client.either import Either
from tests.tandem_client.scripted import CuttingGateway, serving

_QUICK = RetryPolicy(max_resumes=100, initial_wait_s=0.001, max_wait_s=0.001)
_TEXT = "Zürich 🎉 안녕, STO and STOP"


def _ids(model: ServedModel) -> list[int]:
    return list(model.tokenizer.backend.encode(_TEXT, add_special_tokens=False).ids)


def _says(token_ids: list[int]) -> Script:
    """What a decode worker would: goes on behind the tokens of a resume, one token a message, and ends by length."""

    async def script(_: FakeDecode, request: Request, context: Any) -> None:
        await context.write(Response(reservation=decode_pb2.Reservation(num_charged_blocks=2, num_blocks=3)))
        for position in range(len(request.output_token_ids), len(token_ids)):
            await context.write(Response(token_ids=[token_ids[position]], position=position))
        await context.write(Response(position=len(token_ids), finish=generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_LENGTH)))

    return script


@asynccontextmanager
async def _cut(model: ServedModel, kind: str, cuts_after: list[int]) -> AsyncIterator[tuple[Either, CuttingGateway, House]]:
    async with house(model, _says(_ids(model))) as built:
        cutting = CuttingGateway(f"127.0.0.1:{built.gateway.server.port}", cuts_after)
        async with serving(cutting) as target, Either(kind, target, retry=_QUICK) as client:
            yield client, cutting, built


@pytest.mark.parametrize("stop", [None, "STOP", "안녕, STOX"])
async def test_a_cut_behind_any_token_shows_nowhere(kind: str, stop: str | None, model: ServedModel) -> None:
    ids = _ids(model)
    async with _cut(model, kind, []) as (client, cutting, built):
        options: dict[str, Any] = {"max_tokens": len(ids), "stop": stop, "seed": 3}
        uncut = await client.generate("go", **options)
        assert uncut.text == (_TEXT.partition("STOP")[0] if stop == "STOP" else _TEXT)
        assert uncut.finish.reason is (FinishReason.STOP if stop == "STOP" else FinishReason.LENGTH)
        for cut_after in range(1, len(uncut.token_ids) + (stop != "STOP")):
            cutting._cuts_after.append(cut_after)
            completion = await client.generate("go", **options)
            assert (completion.text, completion.token_ids) == (uncut.text, uncut.token_ids), cut_after
            assert (completion.finish, completion.usage.completion_tokens) == (uncut.finish, len(uncut.token_ids))
            assert (completion.usage.prompt_tokens, completion.num_resumes) == (uncut.usage.prompt_tokens, 1)
            await built.assert_nothing_held()


async def test_a_cut_behind_every_token_shows_nowhere(kind: str, model: ServedModel) -> None:
    ids = _ids(model)
    async with _cut(model, kind, [1] * len(ids)) as (client, cutting, _), client.stream("go", max_tokens=len(ids), stop="STOP, or") as stream:
        pieces = [piece async for piece in stream]
        assert "".join(piece.text for piece in pieces) == _TEXT
        assert [token for piece in pieces for token in piece.token_ids] == ids
        assert [piece.position for piece in pieces if piece.token_ids] == list(range(len(ids)))
        assert (await stream.completion()).num_resumes == len(ids)
        assert len({request.sampling_params.seed for request in cutting.requests[1:]}) == 1, "the seed that the gateway drew for the first one"
        assert cutting.requests[1].sampling_params.seed == stream.seed
        assert not cutting.requests[0].sampling_params.HasField("seed")


async def test_what_stood_in_front_of_the_first_token_is_told_once(kind: str, model: ServedModel) -> None:
    ids = _ids(model)
    async with _cut(model, kind, [2]) as (client, _, _):
        completion = await client.generate("Prompt: ", max_tokens=len(ids), echo=True)
        assert (completion.text, completion.num_resumes) == ("Prompt: " + _TEXT, 1)
        assert completion.prompt_token_ids == tuple(model.tokenizer.backend.encode("Prompt: ", add_special_tokens=False).ids)
