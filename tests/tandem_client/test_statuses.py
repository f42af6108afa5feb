"""What becomes of each status: tried again, gone on with, or told."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import grpc
import pytest

from rpc.errors import StatusError, already_exists, deadline_exceeded, exhausted, internal, invalid_argument, not_found, unavailable
from tandem_client import (
    AlreadyInFlight,
    DeadlineExceeded,
    FinishReason,
    Internal,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RetryPolicy,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from tests.tandem_client.either import Either
from tests.tandem_client.scripted import Act, ScriptedGateway, cuts, hangs, message, refuses, says, serving, then

WHOLE = says(message(0, 5, text="a", seed=7), message(1, 6, text="b", finish=True), trailers=(("tandem-path", "local"), ("tandem-kv-bytes", "12")))
QUICK = RetryPolicy(initial_wait_s=0.001, max_wait_s=0.002)
_CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("status", "expected", "fields"),
    [
        (invalid_argument("sampling_params.top_p", "must be above 0"), InvalidRequest, {"field": "sampling_params.top_p"}),
        (not_found("MODEL_NOT_FOUND", "model 'x' is not served"), ModelNotFound, {"reason": "MODEL_NOT_FOUND"}),
        (already_exists("request r is in flight"), AlreadyInFlight, {}),
        (exhausted("QUEUE_FULL", "the queue is full", None), Overloaded, {"reason": "QUEUE_FULL", "retry_after_s": None}),
        (deadline_exceeded("queue"), DeadlineExceeded, {"phase": "queue"}),
        (internal(), Internal, {"reason": "INTERNAL"}),
        (StatusError(_CODE.UNAUTHENTICATED, "no key"), Unauthenticated, {}),
        (StatusError(_CODE.PERMISSION_DENIED, "not yours"), PermissionDenied, {}),
        (StatusError(_CODE.ABORTED, "a hold broke"), Internal, {"code": _CODE.ABORTED}),
    ],
)
async def test_a_status_that_does_not_pass_by_itself_is_told_at_once(
    kind: str, status: StatusError, expected: type[TandemError], fields: dict[str, Any]
) -> None:
    gateway = ScriptedGateway(refuses(status))
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client:
        with pytest.raises(expected) as raised:
            await client.generate("x", request_id="mine")
        error = raised.value
        assert type(error) is expected
        assert (error.message, error.request_id, error.tokens_sent, len(gateway.requests)) == (status.message, "mine", 0, 1)
        assert {name: getattr(error, name) for name in fields} == fields
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.request_id) == (expected, str(error), "mine")


@pytest.mark.parametrize(
    "refusal", [exhausted("QUEUE_FULL", "full", 0.03), unavailable("NO_DECODE", "none", 0.03), unavailable("DRAINING", "drains"), None], ids=str
)
async def test_what_passes_is_tried_again_no_earlier_than_the_server_asks(kind: str, refusal: StatusError | None) -> None:
    gateway = ScriptedGateway(refuses(refusal) if refusal else cuts(), WHOLE)
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client:
        began = asyncio.get_running_loop().time()
        completion = await client.generate("x", request_id="mine")
        assert asyncio.get_running_loop().time() - began >= ((refusal.retry_after_s or 0) if refusal else 0)
        assert (completion.text, completion.num_retries, completion.num_resumes, completion.request_id) == ("ab", 1, 0, "mine")
        assert [request.request_id for request in gateway.requests] == ["mine", "mine:2"]
        assert not gateway.requests[1].output_token_ids


async def test_attempts_before_the_first_token_are_bounded(kind: str) -> None:
    gateway = ScriptedGateway(cuts())
    async with serving(gateway) as target, Either(kind, target, retry=RetryPolicy(max_attempts=3, initial_wait_s=0.001)) as client:
        with pytest.raises(Unavailable) as raised:
            await client.generate("x")
        assert len(gateway.requests) == 3
        assert raised.value.__notes__ == ["not tried again: 3 attempts are the most (RetryPolicy.max_attempts)"]


@pytest.mark.parametrize("code", [_CODE.INTERNAL, _CODE.UNKNOWN, _CODE.CANCELLED])
async def test_a_cut_of_another_code_before_the_first_token_is_told(kind: str, code: grpc.StatusCode) -> None:
    gateway = ScriptedGateway(cuts(code))
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client:
        with pytest.raises(Unavailable if code is _CODE.CANCELLED else Internal):
            await client.generate("x")
        assert len(gateway.requests) == 1


@pytest.mark.parametrize("code", [_CODE.UNAVAILABLE, _CODE.INTERNAL, _CODE.UNKNOWN, _CODE.CANCELLED])
async def test_behind_the_first_token_every_cut_is_gone_on_from_with_the_seed_and_the_tokens_that_came(kind: str, code: grpc.StatusCode) -> None:
    first = then(says(message(0, 5, 6, text="a", seed=77)), cuts(code))
    rest = says(message(2, 7, text="b", seed=77), message(3, 8, text="c", finish=True))
    gateway = ScriptedGateway(first, rest)
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client, client.stream([1, 2], request_id="r", max_tokens=4) as stream:
        pieces = [piece async for piece in stream]
        assert [(piece.position, piece.token_ids) for piece in pieces] == [(0, (5, 6)), (2, (7,)), (3, (8,))]
        completion = await stream.completion()
        assert (completion.text, completion.token_ids, completion.seed, completion.num_resumes) == ("abc", (5, 6, 7, 8), 77, 1)
        assert completion.usage.completion_tokens == 4
        [_, again] = gateway.requests
        assert (list(again.output_token_ids), again.sampling_params.seed, again.request_id) == ([5, 6], 77, "r:2")
        assert (list(again.token_ids.ids), again.sampling_params.max_tokens) == ([1, 2], 4)


@pytest.mark.parametrize(("seed", "model"), [(77, "other"), (78, "m")])
async def test_a_resume_asks_for_the_model_that_began_and_takes_no_other_ones_tokens(kind: str, seed: int, model: str) -> None:
    """Behind one address the model may be replaced while a stream is cut."""
    goes_on = message(1, 6, text="b", seed=seed, finish=True)
    goes_on.model = model
    gateway = ScriptedGateway(then(says(message(0, 5, text="a", seed=77)), cuts()), says(goes_on))
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client:
        with pytest.raises(Internal, match="goes on by"):
            await client.generate("x")
        assert [request.model for request in gateway.requests] == ["", "m"]


async def test_a_lost_decode_is_gone_on_from_and_the_servers_own_error_is_not(kind: str) -> None:
    began = says(message(0, 5, text="a", seed=7))
    gateway = ScriptedGateway(then(began, refuses(unavailable("DECODE_LOST", "lost", 0.01))), then(says(message(1, 6, text="b")), refuses(internal())))
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client, client.stream("x") as stream:
        assert [(await anext(stream)).text for _ in range(2)] == ["a", "b"]
        for _ in range(2):
            with pytest.raises(Internal) as raised:
                await anext(stream)
        assert (raised.value.reason, raised.value.tokens_sent) == ("INTERNAL", 2)
        assert (stream.choices[0].text, stream.choices[0].finish) == ("ab", None)


async def test_the_number_of_resumes_is_bounded_and_tokens_start_it_anew_for_retries_only(kind: str) -> None:
    def act(position: int) -> Act:
        return then(says(message(position, 5, text="a", seed=7)), cuts())

    gateway = ScriptedGateway(act(0), cuts(), cuts(), act(1), act(2))
    async with serving(gateway) as target, Either(kind, target, retry=RetryPolicy(max_attempts=1, max_resumes=2, initial_wait_s=0.001)) as client:
        with pytest.raises(Unavailable) as raised:
            await client.generate("x")
        assert raised.value.tokens_sent == 3
        assert raised.value.__notes__ == ["not resumed: 2 cuts are the most (RetryPolicy.max_resumes)"]
        assert len(gateway.requests) == 5


async def test_a_cut_stream_of_several_samples_says_that_it_cannot_be_resumed(kind: str) -> None:
    gateway = ScriptedGateway(then(says(message(0, 5, text="a", seed=7), message(0, 6, text="b", index=1)), cuts()))
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client:
        with pytest.raises(Unavailable, match="not resumed: a stream of 2 samples cannot be") as raised:
            await client.generate("x", n=2)
        assert (raised.value.tokens_sent, len(gateway.requests)) == (2, 1)


async def test_a_cut_behind_the_last_message_costs_nothing(kind: str) -> None:
    gateway = ScriptedGateway(then(WHOLE, cuts()))
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client:
        completion = await client.generate("x")
        assert (completion.text, completion.num_resumes, len(gateway.requests)) == ("ab", 0, 1)


@pytest.mark.parametrize(
    "act",
    [
        says(message(0, 5, seed=7), message(2, 6)),
        says(message(0, 5, seed=7), message(0, 5)),
        says(message(0, 5, seed=7), message(0, 5, index=1)),
        says(message(0, 5, seed=7, finish=True), message(1, 6)),
        says(message(0, 5, seed=7)),
    ],
    ids=["gap", "twice", "other sample", "behind its finish", "no finish"],
)
async def test_an_answer_that_cannot_be_is_an_error_and_ends_on_the_server(kind: str, act: Act) -> None:
    gateway = ScriptedGateway(act)
    async with serving(gateway) as target, Either(kind, target, retry=QUICK) as client:
        with pytest.raises(Internal, match="BROKEN_STREAM"):
            await client.generate("x")
        assert len(gateway.requests) == 1
        await asyncio.wait_for(gateway.idle.wait(), 10)


async def test_one_deadline_covers_all_attempts(kind: str) -> None:
    gateway = ScriptedGateway(cuts(), then(says(message(0, 5, seed=7)), cuts()), hangs)
    async with serving(gateway) as target, Either(kind, target, retry=RetryPolicy(initial_wait_s=0.1), timeout_s=20.0) as client:
        with pytest.raises(DeadlineExceeded) as raised:
            await client.generate("x", timeout_s=0.7)
        assert (raised.value.phase, raised.value.tokens_sent) == ("decode", 1)
        assert 0.75 > gateway.times_left[0] > gateway.times_left[1] > gateway.times_left[2]
        await asyncio.wait_for(gateway.idle.wait(), 10)


async def test_a_deadline_before_the_first_token_says_so_and_the_clients_own_is_the_default(kind: str) -> None:
    async with serving(ScriptedGateway(hangs)) as target, Either(kind, target, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded) as raised:
            await client.generate("x")
        assert raised.value.phase == "first_token"


async def test_no_wait_is_begun_that_would_reach_the_deadline(kind: str) -> None:
    gateway = ScriptedGateway(refuses(exhausted("QUEUE_FULL", "full", 60.0)), WHOLE)
    async with serving(gateway) as target, Either(kind, target) as client:
        with pytest.raises(Overloaded) as raised:
            await asyncio.wait_for(client.generate("x", timeout_s=30.0), 10)
        assert (raised.value.retry_after_s, raised.value.reason, len(gateway.requests)) == (60.0, "QUEUE_FULL", 1)


async def test_a_client_whose_calls_are_all_refused_stops_trying_again(kind: str) -> None:
    gateway = ScriptedGateway(refuses(unavailable("NO_DECODE", "none", 0.001)))
    policy = RetryPolicy(max_attempts=100, max_budget=10.0)
    async with serving(gateway) as target, Either(kind, target, retry=policy) as client:
        for _ in range(8):
            with pytest.raises(Unavailable):
                await client.generate("x")
        assert len(gateway.requests) == 4 + 8, "half of the budget, and each call's first attempt"


async def test_questions_are_tried_again_too_and_carry_the_key(kind: str) -> None:
    gateway = ScriptedGateway(cuts(), refuses(unavailable("DRAINING", "drains", 0.001)), WHOLE)
    async with serving(gateway) as target, Either(kind, target, retry=QUICK, api_key="sk-1") as client:
        [model] = await client.models(timeout_s=10.0)
        assert (model.id, model.max_model_len, model.eos_token_ids) == ("m", 10, (2,))
        assert [one.get("authorization") for one in gateway.metadata] == ["Bearer sk-1"] * 3
        with pytest.raises(TandemError) as raised:
            await client.status()
        assert raised.value.code is _CODE.UNIMPLEMENTED


async def test_the_whole_has_what_the_last_message_and_the_trailers_say(kind: str) -> None:
    async with serving(ScriptedGateway(WHOLE)) as target, Either(kind, target) as client:
        completion = await client.generate("x")
        assert (completion.path.kind, completion.path.kv_bytes, completion.model) == ("local", 12, "m")
        assert completion.finish.reason is FinishReason.LENGTH
        assert completion.usage.total_tokens == 5


async def test_an_unreachable_gateway_is_unavailable_without_a_reason(kind: str) -> None:
    async with Either(kind, "127.0.0.1:1", retry=RetryPolicy.never()) as client:
        with pytest.raises(Unavailable) as raised:
            await client.generate("x")
        assert (raised.value.reason, raised.value.retry_after_s) == ("", None)
