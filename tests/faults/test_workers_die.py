"""A worker is killed in whatever phase its requests are in: clean statuses, nothing held, everybody else lives on, and a restart on the same port is found."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from checks.tiny_models import VOCAB_SIZE
from tests.support.live_request import LiveRequest, request_of
from tests.support.live_stack import LiveStack, live_stack, options_of, until
from tests.support.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")
_SAMPLED = {"max_tokens": 24, "temperature": 0.8, "seed": 11}
_SLOW_COPIES, _SLOW_QUEUE = "kv_transfer=delay:0.5", "prefill.queue=delay:30"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(served_model: Path) -> AsyncIterator[LiveStack]:
    """Decode tries prefill once and computes prompts of up to 64 tokens itself. Copies are slow, and long prompts take hundreds of steps."""
    options = options_of(
        served_model,
        prefill="--max-prefill-tokens-per-step=8",
        decode="--max-prefill-attempts=1 --max-local-prefill-tokens=64",
        environment={"TANDEM_FAILPOINTS": _SLOW_COPIES},
    )
    async with live_stack(options) as running:
        yield running
        running.assert_clean_logs()


def _prompt(num_tokens: int) -> list[int]:
    """A new one each time: nothing is cached."""
    return random.choices(range(3, VOCAB_SIZE), k=num_tokens)


async def _is_in(stack: LiveStack, phase: str, computed_before: int, requests: list[LiveRequest]) -> bool:
    memory = await stack.memory("prefill-0")
    computed = memory.computed_prompt_tokens - computed_before
    match phase:
        case "before the first chunk":
            return memory.num_active_rpcs == 2 and computed == 0
        case "in the middle of a prompt":
            return memory.num_active_rpcs == 2 and computed > 0
        case _:
            return all(request.token_ids for request in requests)


@pytest.mark.parametrize(
    ("phase", "failpoints"),
    [("in the middle of a prompt", _SLOW_COPIES), ("before the first chunk", _SLOW_QUEUE), ("while blocks are copied", _SLOW_COPIES)],
)
async def test_prefill_killed_costs_what_the_policy_says_and_nothing_else(stack: LiveStack, reference: Reference, phase: str, failpoints: str) -> None:
    await stack.ensure("prefill-0", failpoints)
    computed = (await stack.memory("prefill-0")).computed_prompt_tokens
    short_prompt = _prompt(60)
    long, short = stack.ask(_prompt(3000), **_SAMPLED), stack.ask(short_prompt, **_SAMPLED)
    await until(lambda: _is_in(stack, phase, computed, [long, short]), 20.0, f"never {phase}")
    await stack.kill("prefill-0")

    await short.ended(10.0)
    assert (short.outcome, short.trailers["tandem-path"]) == (("OK", ""), "local_fallback")
    assert short.token_ids == await reference.tokens(short_prompt, **_SAMPLED)
    await long.ended(10.0)
    assert long.outcome == ("UNAVAILABLE", "HANDOVER_FAILED")
    assert long.status is not None and long.status.retry_after_s
    assert int(long.trailers.get("tandem-tokens-sent", 0)) == len(long.token_ids) == (1 if phase == "while blocks are copied" else 0)
    await stack.assert_nothing_held(within_s=2.0)


async def test_without_prefill_requests_are_refused_at_once_until_it_is_back(stack: LiveStack, reference: Reference) -> None:
    if "prefill-0" in stack.workers:
        await stack.kill("prefill-0")
    await until(lambda: _not_ready(stack), 5.0, "the gateway is still ready")
    refused = await stack.ask([5, 6, 7]).ended(5.0)
    assert refused.outcome == ("UNAVAILABLE", "NO_PREFILL")
    assert refused.status is not None and refused.status.retry_after_s
    assert refused.ended_s - refused.started_s < 1.0
    await stack.ensure("prefill-0", _SLOW_COPIES)
    assert await stack.is_ready()
    served = await stack.ask([5, 6, 7], **_SAMPLED).ended()
    assert (served.outcome, served.trailers["tandem-path"]) == (("OK", ""), "handover")
    assert served.token_ids == await reference.tokens([5, 6, 7], **_SAMPLED)
    await stack.assert_nothing_held()


async def _not_ready(stack: LiveStack) -> bool:
    return not await stack.is_ready()


async def test_decode_killed_before_the_first_token_frees_prefill_at_once(stack: LiveStack) -> None:
    await stack.ensure("prefill-0", _SLOW_COPIES)
    computed = (await stack.memory("prefill-0")).computed_prompt_tokens
    requests = [stack.ask(_prompt(3000), **_SAMPLED), stack.ask(_prompt(60), **_SAMPLED)]
    await until(lambda: _is_in(stack, "in the middle of a prompt", computed, requests), 20.0, "prefill never began")
    await stack.kill("decode-0")
    killed_s = time.monotonic()
    for request in requests:
        await request.ended(5.0)
        assert request.outcome == ("UNAVAILABLE", "DECODE_LOST")
        assert request.token_ids == [] and "tandem-tokens-sent" not in request.trailers
        assert request.status is not None and request.status.retry_after_s
    await stack.assert_nothing_held(within_s=1.0)
    assert time.monotonic() - killed_s < 2.0
    refused = await stack.ask([5, 6, 7]).ended(5.0)
    assert refused.outcome == ("UNAVAILABLE", "NO_DECODE")


async def test_decode_killed_in_mid_stream_is_told_with_the_tokens_sent_and_a_resume_completes_them(stack: LiveStack, reference: Reference) -> None:
    await stack.ensure("prefill-0", _SLOW_COPIES)
    await stack.ensure("decode-0")
    asked: list[tuple[list[int], dict[str, Any]]] = [(_prompt(20), {"max_tokens": 1500, "temperature": 0.8, "seed": seed}) for seed in range(4)]
    requests = [stack.ask(prompt, **params) for prompt, params in asked]
    for request in requests:
        await request.tokens(20)
    await stack.kill("decode-0")
    for request in requests:
        await request.ended(5.0)
        assert request.outcome == ("UNAVAILABLE", "DECODE_LOST")
        assert int(request.trailers["tandem-tokens-sent"]) == len(request.token_ids) >= 20
    await stack.assert_nothing_held(within_s=1.0)

    await stack.ensure("decode-0")
    assert await stack.is_ready()
    (prompt, params), sent = asked[0], requests[0].token_ids
    params = {**params, "max_tokens": len(sent) + 10}
    resumed = request_of(prompt, **params)
    resumed.output_token_ids.extend(sent)
    tokens = [token async for message in stack.gateway.Generate(resumed, timeout=30) for token in message.token_ids]
    assert [*sent, *tokens] == await reference.tokens(prompt, **params)
    await stack.assert_nothing_held()
