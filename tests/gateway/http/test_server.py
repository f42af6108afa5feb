"""The HTTP door over real connections: answers, streams, pages."""

from __future__ import annotations

import asyncio

from gateway.served_model import ServedModel
from tests.gateway.fake_decode import tokens
from tests.gateway.house import house
from tests.gateway.http.open_door import events_of, open_door


def ids_of(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.backend.encode(text, add_special_tokens=False).ids)


async def test_a_whole_completion_has_text_usage_and_the_grpc_doors_trailers_as_headers(model: ServedModel) -> None:
    output = ids_of(model, "The capital is Zürich 🎉.")
    async with house(model, tokens(output), num_prefills=1) as h, open_door(h) as door, door.post(max_tokens=64, headers={"X-Request-Id": "r-1"}) as response:
        content = await response.json()
        assert response.status == 200
        assert content["choices"][0]["text"] == "The capital is Zürich 🎉."
        assert content["choices"][0]["finish_reason"] == "length"
        assert content["usage"]["completion_tokens"] == len(output)
        expected = {
            "x-request-id": "r-1",
            "tandem-request-id": "r-1",
            "tandem-path": "handover",
            "tandem-decode-instance": "d0",
            "tandem-prefill-instance": "p0",
            "tandem-kv-bytes": "4096",
            "tandem-tokens-sent": str(len(output)),
        }
        assert {name: response.headers.get(name) for name in expected} == expected


async def test_a_stream_is_events_that_end_in_done(model: ServedModel) -> None:
    output = ids_of(model, "one two three")
    async with house(model, tokens(output)) as h, open_door(h) as door:
        async with door.post(stream=True, stream_options={"include_usage": True}) as response:
            events = await events_of(response)
            assert response.headers["tandem-decode-instance"] == "d0"
        assert events[-1] == "[DONE]"
        assert "".join(choice["text"] for chunk in events[:-1] for choice in chunk["choices"]) == "one two three"
        assert (events[-2]["choices"], events[-2]["usage"]["completion_tokens"]) == ([], len(output))
        await h.until(lambda: door.counted("/v1/completions", 200) == 1)


async def test_a_chat_is_answered_by_the_models_template(model: ServedModel) -> None:
    async with house(model, tokens(ids_of(model, "fine"))) as h, open_door(h) as door:
        messages = [{"role": "user", "content": "hi"}]
        async with door.post("/v1/chat/completions", model="m", messages=messages) as response:
            content = await response.json()
        assert content["choices"][0]["message"]["content"] == "fine"
        assert list(h.decodes[0].requests[0].prompt_token_ids) == model.tokenizer.encode_chat(messages)


async def test_prompts_of_one_body_run_side_by_side(model: ServedModel) -> None:
    go = asyncio.Event()
    running = 0

    async def script(decode: object, request: object, context: object) -> None:
        nonlocal running
        running += 1
        if running == 3:
            go.set()
        await go.wait()
        await tokens([5])(decode, request, context)  # type: ignore[arg-type]

    async with house(model, script) as h, open_door(h) as door:
        content = await door.completion(prompt=["a", "b", "c"])
        assert [choice["index"] for choice in content["choices"]] == [0, 1, 2]
