"""How HTTP requests end that do not end well: clients that leave or stop reading, refusals, failures, a drain."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from gateway.limits import AdmissionLimits
from gateway.served_model import ServedModel
from rpc.errors import exhausted, internal, invalid_argument, unavailable
from tandem.v1 import generation_pb2
from tests.gateway.fake_decode import FakeDecode, Request, Response, fails, hangs, tokens, waits
from tests.gateway.house import WAIT_S, house
from tests.gateway.http.open_door import OpenDoor, events_of, open_door


def request_bytes(**body: Any) -> bytes:
    content = json.dumps({"model": "m", "prompt": "hello", **body}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content


async def connect(door: OpenDoor, *, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", door.server.port))
    return await asyncio.open_connection(sock=raw, limit=1024)


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_client_that_leaves_ends_its_request_at_once(phase: str, stream: bool, model: ServedModel) -> None:
    script = tokens([5, 6], hang=True) if phase == "decode" else hangs
    limits = AdmissionLimits(max_active_requests=1)
    async with house(model, script, admission=limits) as h, open_door(h) as door:
        _, blocking = await connect(door)
        if phase == "queue":
            blocking.write(request_bytes())
            await h.until(lambda: h.decodes[0].num_running == 1)
        reader, writer = await connect(door)
        writer.write(request_bytes(stream=stream))
        if phase == "queue":
            await h.until(lambda: h.gateway.admission.num_waiting == 1)
        else:
            await h.until(lambda: h.decodes[0].num_running == 1)
        if phase == "decode" and stream:
            await reader.readuntil(b"data: ")
        elif phase == "decode":
            await h.until(lambda: h.metric("generation_tokens_total") == 2)
        await leave(writer)
        await h.until(lambda: door.counted("/v1/completions", 499) == 1)
        assert h.metric("requests_total", finished_reason="abort", grpc_code="CANCELLED") == 1
        if phase == "queue":
            assert h.gateway.admission.num_waiting == 0
        await leave(blocking)
        await h.until(lambda: h.decodes[0].num_running == 0)


async def test_a_client_that_leaves_within_its_body_leaves_nothing(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door:
        _, writer = await connect(door)
        writer.write(request_bytes()[:-5])
        await writer.drain()
        await h.until(lambda: door.server.num_connections == 1)
        await leave(writer)
        await h.until(lambda: door.server.num_connections == 0)
        assert h.decodes[0].requests == []


async def test_a_reader_that_stops_holds_decode_back_and_is_given_up_at_its_deadline(model: ServedModel) -> None:
    num_tokens, num_samples = 400, 16
    top = [generation_pb2.TopLogprob(token_id=token, logprob=-1.0) for token in range(20)]

    async def floods(_: FakeDecode, __: Request, context: Any) -> None:
        for position in range(num_tokens):
            for index in range(num_samples):
                logprobs = [generation_pb2.TokenLogprob(token_id=5, logprob=-1.0, top_logprobs=top)]
                await context.write(Response(index=index, token_ids=[5], position=position, logprobs=logprobs))

    async with house(model, floods, max_request_time_s=2.0) as h, open_door(h) as door:
        door.server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those it accepts take it over
        _, writer = await connect(door, receive_buffer=4096)
        writer.write(request_bytes(stream=True, max_tokens=num_tokens, n=num_samples, logprobs=20))
        await h.until(lambda: h.metric("generation_tokens_total") > 0)
        seen = -1.0
        while seen != h.metric("generation_tokens_total"):  # until nothing moves any more
            seen = h.metric("generation_tokens_total")
            await asyncio.sleep(0.2)
        assert seen < num_tokens * num_samples / 4
        assert h.gateway.admission.num_active == 1, "held back, not given up"
        await h.until(lambda: door.counted("/v1/completions", 504) == 1)
        await h.until(lambda: door.server.num_connections == 0)
        assert h.metric("requests_total", finished_reason="error", grpc_code="DEADLINE_EXCEEDED") == 1
        await leave(writer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "kind", "retry"),
    [
        (unavailable("HANDOVER_FAILED", "no", 0.25), 503, "Service Unavailable", "250"),
        (exhausted("TENANT_QUOTA", "no", 2.5), 429, "Too Many Requests", "2500"),
        (invalid_argument("sampling_params.top_p", "no"), 400, "BadRequestError", None),
        (internal("with secrets"), 500, "InternalServerError", None),
    ],
)
async def test_an_error_before_the_first_token_is_a_status(error: Any, code: int, kind: str, retry: str | None, stream: bool, model: ServedModel) -> None:
    async with house(model, fails(error)) as h, open_door(h) as door:
        status, told, headers = await door.error(stream=stream)
        assert (status, told["type"]) == (code, kind)
        assert told["param"] == ("top_p" if code == 400 else None)
        assert "secrets" not in told["message"]
        assert headers.get("retry-after-ms") == retry
        assert headers.get("retry-after") == (None if retry is None else str(-(-int(retry) // 1000)))
        assert headers["x-should-retry"] == ("false" if retry is None else "true")
        assert headers["tandem-decode-instance"] == "d0"


async def test_an_error_behind_the_first_token_is_an_event_and_no_done_follows(model: ServedModel) -> None:
    async def breaks(decode: FakeDecode, request: Request, context: Any) -> None:
        await context.write(Response(token_ids=[5]))
        raise unavailable("HANDOVER_FAILED", "lost", 1.0)

    async with house(model, breaks) as h, open_door(h) as door:
        async with door.post(stream=True) as response:
            assert response.status == 200
            events = await events_of(response)
        assert events[-1] == {"error": {"message": "lost", "type": "Service Unavailable", "param": None, "code": 503}}
        assert events[0]["choices"][0]["finish_reason"] is None
        await h.until(lambda: door.counted("/v1/completions", 503) == 1)
        status, _, _ = await door.error()
        assert status == 503, "a whole answer has no first token to be behind of"


async def test_the_failure_of_one_prompt_ends_all_of_its_body(model: ServedModel) -> None:
    async def first_fails(decode: FakeDecode, request: Request, context: Any) -> None:
        if len(decode.requests) < 3:
            await asyncio.Event().wait()
        raise unavailable("HANDOVER_FAILED", "lost", 1.0)

    async with house(model, first_fails) as h, open_door(h) as door:
        status, _, _ = await door.error(prompt=["a", "b", "c", "d"])
        assert status == 503
        await h.until(lambda: h.decodes[0].num_running == 0)


async def test_a_full_queue_says_when_to_come_back(model: ServedModel) -> None:
    limits = AdmissionLimits(max_active_requests=1, max_queue_requests=0)
    go = asyncio.Event()
    async with house(model, waits(go, tokens([5])), admission=limits) as h, open_door(h) as door:
        first = asyncio.create_task(door.completion())
        await h.until(lambda: h.gateway.admission.num_active == 1)
        status, told, headers = await door.error()
        assert (status, told["type"], headers["x-should-retry"]) == (429, "Too Many Requests", "true")
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) >= 1
        go.set()
        await first


async def test_an_id_in_flight_and_a_deadline_have_their_statuses(model: ServedModel) -> None:
    async with house(model, hangs, max_request_time_s=0.5) as h, open_door(h) as door:
        first = asyncio.create_task(door.error(headers={"x-request-id": "same"}))
        await h.until(lambda: h.decodes[0].num_running == 1)
        assert (await door.error(headers={"x-request-id": "same"}))[0] == 409
        status, told, headers = await first
        assert (status, told["message"], headers["x-should-retry"]) == (504, "the deadline passed in phase prefill", "false")
        assert (await door.error(model="other"))[:2] == (
            404,
            {"message": "model 'other' is not served; 'm' is", "type": "NotFoundError", "param": None, "code": 404},
        )


async def test_a_drain_refuses_new_requests_and_waits_for_running_ones(model: ServedModel) -> None:
    go = asyncio.Event()
    async with house(model, waits(go, tokens([5, 6]))) as h, open_door(h) as door:
        running = asyncio.create_task(door.completion())
        await h.until(lambda: h.decodes[0].num_running == 1)
        async with door.session.get(door.url + "/health") as response:
            assert response.status == 200
        draining = asyncio.create_task(door.server.drain(WAIT_S))
        await asyncio.sleep(0)
        async with door.session.get(door.url + "/health") as response:
            assert (response.status, await response.read()) == (503, b"")
        status, told, headers = await door.error()
        assert (status, told["message"], headers["retry-after"], headers["retry-after-ms"]) == (503, "the server is shutting down", "1", "1000")
        go.set()
        assert (await running)["usage"]["completion_tokens"] == 2
        assert await draining


async def test_a_drains_grace_ends_what_still_runs_with_an_error(model: ServedModel) -> None:
    async with house(model, tokens([5, 6], hang=True)) as h, open_door(h) as door:

        async def stream() -> list[Any]:
            async with door.post(stream=True) as response:
                return await events_of(response)

        streamed, whole = asyncio.create_task(stream()), asyncio.create_task(door.error())
        await h.until(lambda: h.metric("generation_tokens_total") == 4)
        assert not await door.server.drain(0.05)
        assert (await streamed)[-1]["error"]["message"] == "the server is shutting down"
        assert (await whole)[0] == 503
        await h.until(lambda: h.decodes[0].num_running == 0)
