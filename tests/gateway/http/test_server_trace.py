from __future__ import annotations

from gateway.served_model import ServedModel
from telemetry.receiver import OtlpReceiver
from tests.gateway.fake_decode import tokens
from tests.gateway.house import house
from tests.gateway.http.open_door import open_door

_TRACE, _PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_request_is_a_server_span_below_its_clients(model: ServedModel, receiver: OtlpReceiver) -> None:
    async with house(model, tokens([5, 6])) as h, open_door(h) as door:
        async with door.post(headers={"traceparent": f"00-{_TRACE}-{_PARENT}-01", "x-request-id": "r-1"}) as response:
            await response.read()
        await h.until(lambda: any(span.name == "POST /v1/completions" for span in receiver.spans))
        [server] = [span for span in receiver.spans if span.name == "POST /v1/completions"]
        assert (server.kind, server.trace_id, server.parent_id, server.status) == ("SERVER", _TRACE, _PARENT, "UNSET")
        attributes = server.attributes
        assert (attributes["http.request.method"], attributes["http.route"], attributes["http.response.status_code"]) == ("POST", "/v1/completions", 200)
        assert (attributes["gen_ai.request.model"], attributes["gen_ai.usage.output_tokens"], attributes["tandem.request_id"]) == ("m", 2, "r-1")
        assert [event.name for event in server.events] == ["first_token"]
        below = {span.name: span for span in receiver.spans if span.parent_id == server.span_id}
        assert set(below) == {"tokenize", "queue", "route", "tandem.v1.DecodeService/Generate"}


async def test_each_prompt_of_several_has_a_span(model: ServedModel, receiver: OtlpReceiver) -> None:
    async with house(model, tokens([5, 6])) as h, open_door(h) as door:
        await door.completion(prompt=["a", "b"])
        await h.until(lambda: any(span.name == "POST /v1/completions" for span in receiver.spans))
        [server] = [span for span in receiver.spans if span.name == "POST /v1/completions"]
        prompts = [span for span in receiver.spans if span.name == "prompt"]
        assert {span.parent_id for span in prompts} == {server.span_id}
        assert sorted(str(span.attributes["tandem.prompt_index"]) for span in prompts) == ["0", "1"]
        assert all(span.attributes["gen_ai.usage.output_tokens"] == 2 for span in prompts)


async def test_a_servers_fault_fails_its_span_and_pages_have_none(model: ServedModel, receiver: OtlpReceiver) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door:
        h.decodes[0].load.change(ready=False)
        await h.until(lambda: not h.gateway.ready)
        async with door.session.get(door.url + "/health") as response:
            assert response.status == 503
        assert (await door.error())[0] == 503
        await h.until(lambda: any(span.name == "POST /v1/completions" for span in receiver.spans))
        [server] = [span for span in receiver.spans if span.kind == "SERVER"]
        assert (server.status, server.attributes["error.type"]) == ("ERROR", "503")
