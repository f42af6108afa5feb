"""How requests end that do not end well, and what waits."""

from __future__ import annotations

import asyncio
import itertools
import time

import grpc
import pytest

from gateway.limits import AdmissionLimits
from gateway.served_model import ServedModel
from rpc.errors import StatusError, exhausted, internal, invalid_argument, unavailable
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2
from tests.gateway.fake_decode import Response, fails, hangs, says, tokens, waits
from tests.gateway.house import WAIT_S, ask, house


def ids_of(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.backend.encode(text, add_special_tokens=False).ids)


async def test_refusals_name_the_field_and_reach_no_worker(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h:
        for request, field in (
            (ask("x", temperature=float("nan")), "sampling_params.temperature"),
            (gateway_pb2.GenerateRequest(), "input"),
            (ask("x " * 600), "text"),
            (ask("x", max_tokens=600), "sampling_params.max_tokens"),
            (ask(chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="wizard")])), "chat.messages[0].role"),
        ):
            with pytest.raises(StatusError) as refused:
                await h.generate(request)
            assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x", model="other"))
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        with pytest.raises(grpc.aio.AioRpcError, match="request: must be set"):
            await h.stub.GenerateUnary(gateway_pb2.GenerateUnaryRequest(), timeout=WAIT_S)
        assert h.decodes[0].requests == []
        assert h.metric("requests_total", finished_reason="error", grpc_code="INVALID_ARGUMENT") == 5


async def test_a_conversation_that_the_template_refuses_names_where(models: dict[str, ServedModel]) -> None:
    def chat(*turns: tuple[str, str]) -> gateway_pb2.GenerateRequest:
        return ask(chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role=role, content=content) for role, content in turns]))

    async with house(models["llama2"], tokens([5])) as h:
        for request, field, words in (
            (chat(("user", "a"), ("user", "b")), "chat.messages", "roles must alternate"),
            (chat(("user", "a"), ("assistant", "\ufdd1")), "chat.messages[1].content", "noncharacter"),
        ):
            with pytest.raises(StatusError, match=words) as refused:
                await h.generate(request)
            assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert h.decodes[0].requests == []


async def test_a_request_id_in_flight_is_refused_until_it_has_ended(model: ServedModel) -> None:
    go, reached = asyncio.Event(), asyncio.Event()
    async with house(model, waits(go, tokens([5]), reached=reached)) as h:
        first = asyncio.create_task(h.generate(ask("x", request_id="same")))
        await reached.wait()
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x", request_id="same"))
        assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
        go.set()
        await first
        await h.generate(ask("x", request_id="same"))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_clients_cancel_ends_decodes_call(phase: str, model: ServedModel) -> None:
    reached = asyncio.Event()
    async with house(model, waits(asyncio.Event(), hangs, reached=reached) if phase == "prefill" else tokens([5, 6], hang=True)) as h:
        call = h.stub.Generate(ask("x"))
        await (reached.wait() if phase == "prefill" else call.read())
        call.cancel()
        async with asyncio.timeout(WAIT_S):
            await h.decodes[0].idle.wait()
        await h.until(lambda: h.metric("requests_total", finished_reason="abort", grpc_code="CANCELLED") == 1)


async def test_a_cancel_in_the_queue_gives_the_place_back(model: ServedModel) -> None:
    go = asyncio.Event()
    async with house(model, waits(go, tokens([5])), admission=AdmissionLimits(max_active_requests=1)) as h:
        first = asyncio.create_task(h.generate(ask("x")))
        await h.until(lambda: h.gateway.admission.num_active == 1)
        second = h.stub.Generate(ask("x"))
        await h.until(lambda: h.metric("num_requests_waiting") == 1)
        second.cancel()
        await h.until(lambda: h.gateway.admission.num_waiting == 0)
        go.set()
        await first


async def test_a_deadline_names_the_phase(model: ServedModel) -> None:
    async with house(model, hangs, admission=AdmissionLimits(max_active_requests=1), max_request_time_s=0.4) as h:
        first = asyncio.create_task(h.generate(ask("x")))
        await h.until(lambda: h.gateway.admission.num_active == 1)
        for task, phase in ((h.generate(ask("x"), timeout=0.2), "queue"), (first, "prefill")):
            with pytest.raises(StatusError) as late:
                await task
            assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if late.value.metadata:
                assert late.value.metadata["phase"] == phase
        await h.until(lambda: h.metric("requests_total", finished_reason="error", grpc_code="DEADLINE_EXCEEDED") == 2)


async def test_the_own_time_limit_names_the_phase(model: ServedModel) -> None:
    async with house(model, tokens([5, 6], hang=True), max_request_time_s=0.3) as h:
        with pytest.raises(StatusError) as late:
            await h.generate(ask("x"))
        assert (late.value.code, late.value.metadata["phase"], late.value.trailers["tandem-tokens-sent"]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "decode", "2")


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (unavailable("HANDOVER_FAILED", "no"), grpc.StatusCode.UNAVAILABLE, "HANDOVER_FAILED"),
        (internal(), grpc.StatusCode.INTERNAL, "INTERNAL"),
        (RuntimeError("secret"), grpc.StatusCode.INTERNAL, "INTERNAL"),
        (StatusError(grpc.StatusCode.CANCELLED, "gone"), grpc.StatusCode.UNAVAILABLE, "DECODE_LOST"),
        (StatusError(grpc.StatusCode.UNKNOWN, "what"), grpc.StatusCode.INTERNAL, "INTERNAL"),
        (invalid_argument("prompt", "no"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "secret of the channel"), grpc.StatusCode.INTERNAL, "INTERNAL"),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_decodes_errors_are_statuses_with_the_tokens_sent(
    error: Exception, code: grpc.StatusCode, reason: str, num_tokens: int, model: ServedModel
) -> None:
    reservation = Response(reservation=decode_pb2.Reservation(num_charged_blocks=1))
    script = fails(error, after=says(reservation, *[Response(token_ids=[5 + i], position=i) for i in range(num_tokens)]))
    async with house(model, script) as h:
        with pytest.raises(StatusError) as failed:
            await h.generate(ask("x"))
        assert (failed.value.code, failed.value.reason) == (code, reason)
        assert failed.value.trailers.get("tandem-tokens-sent", "0") == str(num_tokens)
        assert "secret" not in failed.value.message


async def test_a_stream_that_skips_a_token_or_ends_without_a_finish_is_our_fault(model: ServedModel) -> None:
    for script in (says(Response(token_ids=[5], position=1)), says(Response(token_ids=[5], position=0))):
        async with house(model, script) as h:
            with pytest.raises(StatusError) as failed:
                await h.generate(ask("x"))
            assert failed.value.code is grpc.StatusCode.INTERNAL


async def test_a_decode_server_that_dies_mid_stream_is_unavailable(model: ServedModel) -> None:
    async with house(model, tokens([5, 6, 7], hang=True)) as h:
        call = h.stub.Generate(ask("x"))
        for _ in range(3):
            await call.read()
        await h.decodes[0].server._server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        error = StatusError.of(failed.value)
        assert (error.code, error.trailers["tandem-tokens-sent"]) == (grpc.StatusCode.UNAVAILABLE, "3")
        assert "127.0.0.1" not in error.message
        await h.until(lambda: not h.gateway.pools.instances["d0"].available)
        began = time.monotonic()
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x"))
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_DECODE")
        assert refused.value.retry_after_s
        assert time.monotonic() - began < 0.05


async def test_another_decode_instance_is_tried_once_before_the_first_message(model: ServedModel) -> None:
    refusing = fails(unavailable("DRAINING", "no", 1.0))
    async with house(model, refusing, tokens([5])) as h:
        for _ in range(4):
            _, trailers = await h.generate(ask("x"))
            assert trailers["tandem-decode-instance"] == "d1"
        assert h.decodes[0].requests
    async with house(model, refusing, refusing) as h:
        with pytest.raises(StatusError) as failed:
            await h.generate(ask("x"))
        assert (failed.value.code, failed.value.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert sum(len(decode.requests) for decode in h.decodes) == 2
    spent = fails(unavailable("HANDOVER_FAILED", "no", 1.0))
    async with house(model, spent, spent) as h:
        with pytest.raises(StatusError, match="UNAVAILABLE"):
            await h.generate(ask("x"))
        assert sum(len(decode.requests) for decode in h.decodes) == 1, "its budget is spent"


@pytest.mark.parametrize("reason", ["NO_KV_BLOCKS", "NO_SEQUENCE_SLOT"])
async def test_decode_without_room_puts_the_request_back_in_front(reason: str, model: ServedModel) -> None:
    async with house(model, fails(exhausted(reason, "no", None))) as h:
        first = asyncio.create_task(h.generate(ask("first")))
        await h.until(lambda: len(h.decodes[0].requests) >= 1)
        h.decodes[0].script = tokens([5])
        await first
        prompts = [list(request.prompt_token_ids) for request in h.decodes[0].requests]
        assert prompts == [ids_of(model, "first")] * len(prompts)
        assert len(prompts) <= 4, "refused requests are not sent again in a hot loop"


async def test_decode_without_blocks_for_long_is_the_queues_time_limit(model: ServedModel) -> None:
    async with house(model, fails(exhausted("NO_KV_BLOCKS", "no", None)), admission=AdmissionLimits(max_queue_time_s=0.1)) as h:
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x"))
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        assert refused.value.retry_after_s


async def test_returns_to_the_queue_do_not_renew_its_time_limit(model: ServedModel) -> None:
    async with house(model, fails(exhausted("NO_KV_BLOCKS", "no", None)), admission=AdmissionLimits(max_queue_time_s=0.5)) as h:
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x"), timeout=5)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        assert len(h.decodes[0].requests) > 1
        assert h.metric("request_queue_time_seconds_count") == 1


async def test_a_stream_that_the_drain_cuts_says_how_far_it_came(model: ServedModel) -> None:
    async with house(model, tokens([5, 6], hang=True)) as h:
        call = h.stub.Generate(ask("x", request_id="r-1"), timeout=WAIT_S)
        for _ in range(2):
            await call.read()
        await h.gateway.server.drain(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await call.read()
        failed = StatusError.of(cut.value)
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert (failed.trailers["tandem-tokens-sent"], failed.trailers["tandem-request-id"]) == ("2", "r-1")


async def test_requests_in_the_queue_are_served_or_refused_by_the_drain(model: ServedModel) -> None:
    go = asyncio.Event()
    async with house(model, waits(go, tokens([5])), admission=AdmissionLimits(max_active_requests=1)) as h:
        running = [asyncio.create_task(h.generate(ask("x"))) for _ in range(3)]
        await h.until(lambda: h.gateway.admission.num_waiting == 2)
        drain = asyncio.create_task(h.gateway.server.drain(5))
        await h.until(lambda: h.gateway.server.draining)
        with pytest.raises(StatusError, match="shutting down"):
            await h.generate(ask("x"))
        go.set()
        assert await drain
        assert [len(messages) for messages, _ in await asyncio.gather(*running)] == [1, 1, 1]


async def test_a_full_queue_is_refused_with_the_time_to_come_back(model: ServedModel) -> None:
    go = asyncio.Event()
    async with house(model, waits(go, tokens([5])), admission=AdmissionLimits(max_active_requests=1, max_queue_requests=2)) as h:
        running = [asyncio.create_task(h.generate(ask("x"))) for _ in range(3)]
        await h.until(lambda: h.gateway.admission.num_waiting == 2)
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x"))
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refused.value.retry_after_s
        assert h.metric("admission_rejections_total", reason="QUEUE_FULL") == 1
        go.set()
        await asyncio.gather(*running)


async def test_prompts_wait_while_prefill_is_behind(model: ServedModel) -> None:
    go = asyncio.Event()
    limits = AdmissionLimits(max_prefill_backlog_tokens=100)
    async with house(model, waits(go, tokens([5])), num_prefills=1, admission=limits) as h:
        running = [asyncio.create_task(h.generate(ask(token_ids=generation_pb2.TokenIds(ids=[7] * 60)))) for _ in range(4)]
        await h.until(lambda: h.gateway.admission.num_active == 2 and h.gateway.admission.num_waiting == 2)
        go.set()
        await asyncio.gather(*running)


async def test_an_empty_prefill_pool_is_unavailable_and_decode_alone_is_not(model: ServedModel) -> None:
    async with house(model, tokens([5]), num_prefills=1) as h:
        h.prefills[0].load.change(draining=True)
        await h.until(lambda: not h.gateway.pools.instances["p0"].available)
        assert h.gateway.server.not_ready_reason == "no prefill instance is available"
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x"))
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_PREFILL")
        h.prefills[0].load.change(draining=False)
        await h.until(lambda: h.gateway.pools.instances["p0"].available)
        await h.generate(ask("x"))
    async with house(model, tokens([5])) as h:
        await h.generate(ask("x"))
        assert h.decodes[0].requests[0].prefill_instance == ""


async def test_waiting_requests_are_refused_when_the_pool_goes(model: ServedModel) -> None:
    async with house(model, hangs, admission=AdmissionLimits(max_active_requests=1)) as h:
        calls = [asyncio.create_task(h.generate(ask("x"))) for _ in range(2)]
        await h.until(lambda: h.gateway.admission.num_waiting == 1)
        await h.decodes[0].server._server.stop(None)
        for call in calls:
            with pytest.raises(StatusError) as failed:
                await call
            assert failed.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_slow_reader_stops_decode_and_not_the_memory(model: ServedModel) -> None:
    written = 0
    large = generation_pb2.TokenLogprob(top_logprobs=[generation_pb2.TopLogprob(token_id=1, logprob=-0.5)] * 20_000)

    async def floods(_: object, __: object, context: grpc.aio.ServicerContext[object, object]) -> None:
        nonlocal written
        while True:
            await context.write(Response(token_ids=[5], position=written, logprobs=[large]))
            written += 1

    async with house(model, floods) as h:
        call = h.stub.Generate(ask("x", logprobs=0))
        await call.read()
        last = -1
        while last != written:
            last = written
            await asyncio.sleep(0.3)
        assert written < 300, "200 KB each: decode waits for the client within some megabytes"
        call.cancel()


async def test_a_whole_answer_that_no_message_can_hold_ends_as_soon_as_that_is_sure(model: ServedModel) -> None:
    large = generation_pb2.TokenLogprob(top_logprobs=[generation_pb2.TopLogprob(token_id=1, logprob=-0.5)] * 20_000)

    async def floods(_: object, __: object, context: grpc.aio.ServicerContext[object, object]) -> None:
        for position in itertools.count():
            await context.write(Response(token_ids=[5], position=position, logprobs=[large]))

    async with house(model, floods) as h:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await h.stub.GenerateUnary(gateway_pb2.GenerateUnaryRequest(request=ask("x", logprobs=0)), timeout=WAIT_S)
        error = StatusError.of(failed.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        async with asyncio.timeout(WAIT_S):
            await h.decodes[0].idle.wait()
        assert h.metric("requests_total", finished_reason="error", grpc_code="RESOURCE_EXHAUSTED") == 1


async def test_models_and_status_are_told(model: ServedModel) -> None:
    async with house(model, tokens([5]), num_prefills=1, max_model_len=300) as h:
        [listed] = (await h.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        assert (listed.id, listed.max_model_len, list(listed.eos_token_ids)) == ("m", 300, sorted(model.eos_token_ids))
        h.prefills[0].load.change(ready=False)
        await h.until(lambda: not h.gateway.pools.instances["p0"].available)
        status = await h.stub.GetStatus(gateway_pb2.GetStatusRequest())
        states = {instance.name: (instance.role, instance.available, instance.reason) for instance in status.instances}
        assert states == {"d0": (gateway_pb2.INSTANCE_ROLE_DECODE, True, ""), "p0": (gateway_pb2.INSTANCE_ROLE_PREFILL, False, "not ready")}
        assert status.instances[0].load.num_blocks == 1000
        assert not status.draining


async def test_a_worker_with_another_vocabulary_is_not_used(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h:
        h.decodes[0].load.change(vocab_size=17)
        await h.until(lambda: "vocabulary has 17 tokens" in h.gateway.pools.instances["d0"].reason)
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x"))
        assert refused.value.reason == "NO_DECODE"
