"""A prefill instance that answers what was not asked costs an attempt, never a token: its copy is thrown away and nothing that it said goes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from decode_svc.pool import FailurePolicy
from prefill_svc import conversation
from rpc.errors import StatusError
from tandem.v1 import decode_pb2, generation_pb2, prefill_pb2
from tests.support.alone import alone_prompt_logprobs, alone_streams
from tests.support.cluster import open_cluster

PROMPT = list(range(100, 130))
PARAMS: dict[str, Any] = {"n": 2, "temperature": 0.8, "seed": 5, "logprobs": 1, "prompt_logprobs": 1}
Change = Callable[[prefill_pb2.PrefillDone], object]
FIRST: dict[str, Change] = {
    "one too few": lambda done: done.first_tokens.pop(),
    "none": lambda done: done.ClearField("first_tokens"),
    "one too many": lambda done: done.first_tokens.add(token_id=1),
    "an unknown token": lambda done: done.first_tokens.add(token_id=done.first_tokens.pop().token_id + 5000),
    "a log probability of another token": lambda done: done.first_tokens[0].logprob.CopyFrom(generation_pb2.TokenLogprob(token_id=1)),
    "no number": lambda done: setattr(done.first_tokens[1].logprob, "logprob", float("nan")),
}
NUMBERS: dict[str, Change] = {
    "a queue of no time": lambda done: setattr(done, "queue_s", float("nan")),
    "work of no time": lambda done: setattr(done, "prefill_s", float("nan")),
    "a queue of less than no time": lambda done: setattr(done, "queue_s", -1e300),
    "work of less than no time": lambda done: setattr(done, "prefill_s", -1e300),
    "more cached than there is": lambda done: setattr(done, "cached_tokens", len(PROMPT) + 1),
}
LOGPROBS: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "one too few": lambda entries: entries[1:],
    "one too many": lambda entries: [*entries, entries[-1]],
    "in another order": lambda entries: entries[::-1],
}


def _change_done(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    done = conversation.Conversation._done

    async def changed(talk: conversation.Conversation) -> prefill_pb2.PrefillDone:
        message = await done(talk)
        change(message)
        return message

    monkeypatch.setattr(conversation.Conversation, "_done", changed)


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("change", FIRST)
async def test_first_tokens_that_were_not_asked_for_fail_the_attempt(change: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _change_done(monkeypatch, FIRST[change])
    await _expect_local_fallback(max_tokens)


@pytest.mark.parametrize("change", NUMBERS)
async def test_numbers_that_cannot_be_fail_the_attempt(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _change_done(monkeypatch, NUMBERS[change])
    await _expect_local_fallback(8)


@pytest.mark.parametrize("name", ["queue_s", "prefill_s"])
async def test_an_instance_that_claims_to_be_slow_takes_no_attempt_from_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _change_done(monkeypatch, lambda done: setattr(done, name, float("inf")))
    async with open_cluster() as cluster:
        await cluster.generate(cluster.request(PROMPT, **PARAMS))
        await cluster.prefills[0].kill()
        answer = await cluster.generate(cluster.request(PROMPT, **PARAMS))
        assert answer.streams == alone_streams(PROMPT, **PARAMS)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
@pytest.mark.parametrize("change", LOGPROBS)
async def test_log_probabilities_of_another_prompt_fail_the_attempt(change: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
        yield LOGPROBS[change](entries)

    monkeypatch.setattr(conversation, "pieces", changed)
    await _expect_local_fallback(max_tokens)


async def _expect_local_fallback(max_tokens: int) -> None:
    params = PARAMS | {"max_tokens": max_tokens}
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, **params))
        assert answer.streams == alone_streams(PROMPT, **params)
        assert answer.prompt_logprobs == alone_prompt_logprobs(PROMPT, **params)
        assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(decode_pb2.PROMPT_PATH_LOCAL_FALLBACK, 1)]
        await cluster.assert_nothing_held()


async def test_a_token_that_nobody_wanted_fails_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    _change_done(monkeypatch, FIRST["one too many"])
    async with open_cluster(policy=FailurePolicy(max_local_prefill_tokens=0)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(cluster.request(PROMPT, max_tokens=0))
        status = StatusError.of(failed.value)
        assert status.reason == "HANDOVER_FAILED"
        assert "1 first tokens of 0" in status.message
        await cluster.assert_nothing_held()
