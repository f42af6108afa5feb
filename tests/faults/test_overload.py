"""More than the pools take: in order or refused with the time to come back, nothing hangs, and who leaves costs the others nothing."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from checks.tiny_models import VOCAB_SIZE
from tests.support.live_stack import LiveStack, live_stack, options_of, until
from tests.support.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")
_CAPACITY, _QUEUE, _QUEUE_TIME_S = 4, 24, 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(served_model: Path) -> AsyncIterator[LiveStack]:
    """Decode computes four sequences at a time and has blocks for 1536 tokens; 24 requests may wait, for a second at most."""
    options = options_of(
        served_model,
        decode=f"--max-prefill-tokens-per-step=64 --max-num-seqs={_CAPACITY} --num-blocks=96",
        gateway=f"--max-queue-requests={_QUEUE} --max-queue-time-s={_QUEUE_TIME_S}",
    )
    async with live_stack(options) as running:
        yield running
        running.assert_clean_logs()


def _prompt(num_tokens: int) -> list[int]:
    return random.choices(range(3, VOCAB_SIZE), k=num_tokens)


async def test_a_burst_of_ten_times_the_capacity_is_served_in_order_or_told_when_to_come_back(stack: LiveStack, reference: Reference) -> None:
    await stack.ask([5]).ended()  # a client's channel keeps no order until it is connected
    prompts = [_prompt(30) for _ in range(10 * _CAPACITY)]
    requests = [stack.ask(prompt, max_tokens=20, temperature=0.8) for prompt in prompts]
    for request in requests:
        await request.ended()
    served = [request for request in requests if request.outcome == ("OK", "")]
    refused = [request for request in requests if request not in served]
    assert len(served) >= 2 * _CAPACITY and refused  # how many are refused depends on how many have ended before the last one comes
    for request in refused:
        assert request.outcome in (("RESOURCE_EXHAUSTED", "QUEUE_FULL"), ("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT"))
        assert request.status is not None and request.status.retry_after_s
    order = sorted(served, key=lambda request: request.first_token_s)
    assert all(abs(order.index(request) - place) <= _CAPACITY for place, request in enumerate(served)), "somebody was overtaken"
    expected = await asyncio.gather(*(reference.tokens(prompt, max_tokens=20, temperature=0.8) for prompt in prompts))
    assert all(request.token_ids == tokens for request, tokens in zip(requests, expected, strict=True) if request in served)
    await stack.assert_nothing_held()


async def test_sequences_that_outgrow_the_pool_are_computed_again_and_change_nothing(stack: LiveStack, reference: Reference) -> None:
    prompts = [_prompt(100) for _ in range(_CAPACITY)]
    params = {"max_tokens": 500, "temperature": 0.8}
    requests = [stack.ask(prompt, timeout_s=60.0, **params) for prompt in prompts]
    for request in requests:
        await request.ended(60.0)
    expected = await asyncio.gather(*(reference.tokens(prompt, **params) for prompt in prompts))
    assert [(request.outcome, request.token_ids) for request in requests] == [(("OK", ""), tokens) for tokens in expected]
    assert (await stack.memory("decode-0")).computed_prompt_tokens > 0, "none was preempted"
    await stack.assert_nothing_held()


async def test_a_deadline_and_the_queues_own_limit_end_the_wait_for_a_place(stack: LiveStack) -> None:
    running = [stack.ask(_prompt(10), max_tokens=1500, timeout_s=60.0) for _ in range(_CAPACITY)]
    await asyncio.gather(*(request.tokens(1) for request in running))
    impatient, patient = stack.ask(_prompt(10), timeout_s=0.5), stack.ask(_prompt(10), timeout_s=60.0)
    await until(lambda: _num_waiting(stack, 2), 5.0, "nobody waits")
    await impatient.ended(5.0)
    assert impatient.outcome[0] == "DEADLINE_EXCEEDED"
    assert impatient.ended_s - impatient.started_s < 1.0
    await until(lambda: _num_waiting(stack, 1), 1.0, "who has left still waits")
    await patient.ended(10.0)
    assert patient.outcome == ("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT")
    assert _QUEUE_TIME_S <= patient.ended_s - patient.started_s < _QUEUE_TIME_S + 1.0
    for request in running:
        request.cancel()
        await request.ended()
    await stack.assert_nothing_held()


async def _num_waiting(stack: LiveStack, count: int) -> bool:
    return (await stack.status()).num_requests_waiting == count


async def test_after_a_storm_of_clients_that_left_a_request_is_as_quick_as_before(stack: LiveStack, reference: Reference) -> None:
    idle_s = statistics.median([(await stack.ask(_prompt(30)).ended()).ttft_s for _ in range(5)])
    storm = []
    for _ in range(100):
        storm.append(asyncio.create_task(_leave(stack, random.uniform(0.0, 0.5))))
        await asyncio.sleep(random.uniform(0.0, 0.01))
    await asyncio.gather(*storm)
    prompt = _prompt(30)
    good = await stack.ask(prompt).ended()
    assert (good.outcome, good.token_ids) == (("OK", ""), await reference.tokens(prompt))
    assert good.ttft_s < idle_s + 0.25, f"idle {idle_s:.3f} s, after the storm {good.ttft_s:.3f} s"
    await stack.assert_nothing_held(within_s=1.0)


async def _leave(stack: LiveStack, after_s: float) -> None:
    request = stack.ask(_prompt(1000), max_tokens=300)
    await asyncio.sleep(after_s)
    request.cancel()
    await request.ended(5.0)
    assert request.code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)
