"""The openai package, unchanged, against the door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.limits import AdmissionLimits
from gateway.served_model import ServedModel
from rpc.errors import unavailable
from tests.gateway.fake_decode import FakeDecode, Request, Response, hangs, tokens
from tests.gateway.house import WAIT_S, house
from tests.gateway.http.open_door import OpenDoor, open_door


def ids_of(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.backend.encode(text, add_special_tokens=False).ids)


@asynccontextmanager
async def client_of(door: OpenDoor, *, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=max_retries, timeout=WAIT_S) as client:
        yield client


async def test_chat_completion_and_models(model: ServedModel) -> None:
    output = ids_of(model, "fine, thanks")
    async with house(model, tokens(output)) as h, open_door(h) as door, client_of(door) as client:
        [served] = [each async for each in client.models.list()]
        assert (served.id, served.model_dump()["max_model_len"]) == ("m", 512)
        chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "How are you?"}])
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("fine, thanks", "length")
        assert chat.usage is not None
        assert chat.usage.completion_tokens == len(output)
        completion = await client.completions.create(model="m", prompt="How are you?", seed=7, logprobs=None)
        assert completion.choices[0].text == "fine, thanks"


async def test_a_streamed_chat(model: ServedModel) -> None:
    output = ids_of(model, "fine, thanks")
    async with house(model, tokens(output)) as h, open_door(h) as door, client_of(door) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "How are you?"}], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "fine, thanks"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [len(output)]
        assert chunks[-1].choices == []


async def test_errors_are_the_packages_own(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door, client_of(door) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="m", prompt="x", temperature=3)
        assert (bad.value.param, bad.value.type) == ("temperature", "BadRequestError")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].role"):
            await client.chat.completions.create(model="m", messages=[{"role": "wizard", "content": "x"}])  # type: ignore[misc,list-item]


async def test_a_refusal_is_tried_again_after_the_time_it_says(model: ServedModel) -> None:
    async def full_once(decode: FakeDecode, request: Request, context: Any) -> None:
        if len(decode.requests) == 1:
            raise unavailable("DRAINING", "the server is shutting down", 0.01)
        await tokens([5])(decode, request, context)

    async with house(model, full_once) as h, open_door(h) as door, client_of(door, max_retries=1) as client:
        completion = await client.completions.create(model="m", prompt="x")
        assert completion.usage is not None
        assert len(h.decodes[0].requests) == 2


async def test_a_full_queue_is_a_rate_limit(model: ServedModel) -> None:
    limits = AdmissionLimits(max_active_requests=1, max_queue_requests=0)
    async with house(model, tokens([5, 6], hang=True), admission=limits) as h, open_door(h) as door, client_of(door) as client:
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="m", prompt="x")
        assert int(refused.value.response.headers["retry-after-ms"]) > 0
        await stream.close()
        await h.until(lambda: h.gateway.admission.num_active == 0)


async def test_an_error_within_a_stream_is_raised_to_its_reader(model: ServedModel) -> None:
    async def breaks(_: FakeDecode, __: Request, context: Any) -> None:
        await context.write(Response(token_ids=[5]))
        raise unavailable("HANDOVER_FAILED", "lost", 1.0)

    async with house(model, breaks) as h, open_door(h) as door, client_of(door) as client:
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in stream:
                pass


async def test_a_cancelled_call_ends_its_request(model: ServedModel) -> None:
    async with house(model, hangs) as h, open_door(h) as door, client_of(door) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model="m", prompt="x", timeout=0.3)
        await h.until(lambda: door.counted("/v1/completions", 499) == 1)
        await h.until(lambda: h.decodes[0].num_running == 0)
