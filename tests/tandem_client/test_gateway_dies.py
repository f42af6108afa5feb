"""The real services as processes: the gateway is killed, or frozen, in the middle of streams that go on all the same."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tandem_client import Completion, RetryPolicy, Unavailable
from tests.support.live_stack import LiveStack
from tests.tandem_client.either import KINDS, Either, EitherStream

pytestmark = pytest.mark.asyncio(loop_scope="session")
_NUM_TOKENS = 1200
_PROMPT = "Once upon a time"


async def _read(stream: EitherStream, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens.extend((await anext(stream)).token_ids)
    return tokens


async def _go_on(stream: EitherStream, seen: list[int]) -> Completion:
    """Reads on to the end; every token comes once and in order."""
    async for piece in stream:
        if piece.token_ids:
            assert piece.position == len(seen)
        seen.extend(piece.token_ids)
    completion = await stream.completion()
    assert list(completion.token_ids) == seen
    return completion


def _assert_same(completion: Completion, uncut: Completion) -> None:
    assert completion.token_ids == uncut.token_ids
    assert completion.text == uncut.text
    assert [one.token_id for one in completion.logprobs] == list(uncut.token_ids)
    assert completion.logprobs == uncut.logprobs
    assert completion.finish == uncut.finish
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (uncut.usage.prompt_tokens, uncut.usage.completion_tokens)


@pytest.mark.parametrize(("kind", "num_kills"), [("sync", 1), ("asyncio", 2)])
async def test_a_stream_goes_on_through_the_gateways_death_token_for_token(kind: str, num_kills: int, stack: LiveStack) -> None:
    async with Either(kind, stack.stack.gateway_address) as client:
        options = {"max_tokens": _NUM_TOKENS, "ignore_eos": True, "temperature": 0.9, "logprobs": 1}
        async with client.stream(_PROMPT, **options) as stream:
            seen: list[int] = []
            for _ in range(num_kills):
                seen += await _read(stream, 30)
                await stack.kill("gateway")
                restarting = asyncio.create_task(stack.ensure("gateway"))
                seen += await _read(stream, 1) if len(seen) < _NUM_TOKENS else []
                await restarting
            completion = await _go_on(stream, seen)
        assert completion.num_resumes == num_kills
        uncut = await client.generate(_PROMPT, seed=completion.seed, **options)
        assert uncut.num_resumes == 0
        _assert_same(completion, uncut)
        await stack.assert_nothing_held()


@pytest.mark.parametrize("kind", ["sync"])  # the channel's options are the same
async def test_a_frozen_gateway_is_noticed_and_gone_on_from(kind: str, stack: LiveStack) -> None:
    async with Either(kind, stack.stack.gateway_address) as client:
        options = {"max_tokens": _NUM_TOKENS, "ignore_eos": True, "seed": 5, "logprobs": 1}
        async with client.stream(_PROMPT, **options) as stream:
            seen = await _read(stream, 30)
            stack.send("gateway", signal.SIGSTOP)
            try:
                reading = asyncio.create_task(_go_on(stream, seen))
                async with asyncio.timeout(20):
                    while not stream.stream.num_resumes:  # noqa: ASYNC110  # nothing tells a reader of a resume before its first token
                        await asyncio.sleep(0.02)
            finally:
                stack.send("gateway", signal.SIGCONT)
            completion = await reading
        assert completion.num_resumes == 1
        _assert_same(completion, await client.generate(_PROMPT, **options))
        await stack.assert_nothing_held()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_gateway_that_does_not_come_back_is_told_with_the_tokens_that_came(kind: str, stack: LiveStack) -> None:
    policy = RetryPolicy(max_total_wait_s=1.0)
    async with Either(kind, stack.stack.gateway_address, retry=policy) as client:
        try:
            async with client.stream(_PROMPT, max_tokens=_NUM_TOKENS, ignore_eos=True) as stream:
                seen = await _read(stream, 30)
                await stack.kill("gateway")
                with pytest.raises(Unavailable) as raised:
                    await _go_on(stream, seen)
                assert raised.value.tokens_sent == len(seen) == len(stream.choices[0].token_ids)
                assert "max_total_wait_s" in raised.value.__notes__[0]
        finally:
            await stack.ensure("gateway")
        await stack.assert_nothing_held()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_is_left_frees_everything(kind: str, stack: LiveStack) -> None:
    async with Either(kind, stack.stack.gateway_address) as client:
        async with client.stream(_PROMPT, max_tokens=8000, ignore_eos=True) as stream:
            await _read(stream, 3)
        await stack.assert_nothing_held(within_s=2.0)
        streams = [client.stream(_PROMPT, max_tokens=8000, ignore_eos=True) for _ in range(3)]
        for index in range(3):
            await _read(streams[index], 3)
        streams.clear()
        await stack.assert_nothing_held(within_s=2.0)
