"""The routes that generate nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.served_model import ServedModel
from tests.gateway.fake_decode import tokens
from tests.gateway.house import house
from tests.gateway.http.open_door import open_door


async def test_models_is_openais_list_with_vllms_length(model: ServedModel) -> None:
    async with house(model, tokens([5]), max_model_len=300) as h, open_door(h) as door, door.session.get(door.url + "/v1/models") as response:
        content = await response.json()
        [found] = content["data"]
        assert content["object"] == "list"
        assert isinstance(found.pop("created"), int)
        assert found == {"id": "m", "object": "model", "owned_by": "tandem", "root": "m", "parent": None, "max_model_len": 300}


async def test_health_is_empty_and_follows_the_pools(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door:
        for code in (200, 503):
            for method in ("GET", "HEAD"):
                async with door.session.request(method, door.url + "/health") as response:
                    assert (response.status, await response.read()) == (code, b"")
            h.decodes[0].load.change(ready=False)
            await h.until(lambda: not h.gateway.ready)
        h.decodes[0].load.change(ready=True)
        await h.until(lambda: h.gateway.ready)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("application/openmetrics-text; version=nonsense", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
async def test_metrics_come_in_the_form_that_is_asked_for(accept: str | None, content_type: str, model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door:
        await door.completion()
        await h.until(lambda: door.counted("/v1/completions", 200) == 1)
        async with door.session.get(door.url + "/metrics", headers={"accept": accept} if accept else {}) as response:
            text = await response.text()
            assert response.headers["content-type"].startswith(content_type)
        assert 'tandem_http_server_requests_total{http_code="200",http_route="/v1/completions"} 1.0' in text
        assert 'tandem_requests_total{finished_reason="length",grpc_code="OK",model_name="m"} 1.0' in text
        assert text.endswith("# EOF\n") == (content_type.startswith("application/openmetrics"))
        async with door.session.head(door.url + "/metrics") as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_the_version_is_the_gateways(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door, door.session.get(door.url + "/version") as response:
        assert set(await response.json()) == {"version"}


async def test_tokenize_and_detokenize_are_each_others_way_back(model: ServedModel) -> None:
    async def ask(path: str, **body: Any) -> Any:
        async with door.post(path, **body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    text = "The capital is Zürich 🎉."
    async with house(model, tokens([5])) as h, open_door(h) as door:
        found = await ask("/tokenize", model="m", prompt=text, return_token_strs=True)
        assert found["tokens"] == model.tokenizer.encode_text(text)
        assert (found["count"], found["max_model_len"], len(found["token_strs"])) == (len(found["tokens"]), 512, len(found["tokens"]))
        assert (await ask("/tokenize", prompt=text, add_special_tokens=False))["token_strs"] is None
        assert await ask("/detokenize", model="m", tokens=found["tokens"]) == {"prompt": text}
        assert (await door.error("/tokenize", model="other", prompt="x"))[0] == 404
        assert (await door.error("/detokenize", model="other", tokens=[1]))[0] == 404


async def test_an_unknown_path_gets_no_label_of_its_own(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door:
        assert (await door.error("/v1/made-up"))[0] == 404
        await h.until(lambda: door.counted("other", 404) == 1)
        assert door.counted("/v1/made-up", 404) == 0
