"""Two prefill and two decode instances: those that freeze, die or drain cost what is theirs, and the others go on."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from checks.tiny_models import VOCAB_SIZE
from tests.support.live_request import LiveRequest
from tests.support.live_stack import LiveStack, live_stack, options_of, until
from tests.support.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")
_ALL = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_GIVEN_UP_S = 9.0
"""Design trap 7: 4 s until the ping and 4 s for its answer."""
_MARGIN_S = 3.0
_UNDER_WAY_S = 0.5
"""What a frozen process has sent has arrived by then."""
_FROZEN = ("prefill-0", "decode-0", "gateway-1")
_ENDLESS = 8000
"""Tokens; more than a fault lasts."""
_SHORT = {"max_tokens": 10, "temperature": 0.8}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(served_model: Path) -> AsyncIterator[LiveStack]:
    """Pools that long streams do not fill, and no falling back to decode."""
    decode = "--max-local-prefill-tokens=0 --num-blocks=4096"
    options = options_of(served_model, num_prefill=2, num_decode=2, prefill="--max-prefill-tokens-per-step=8", decode=decode)
    async with live_stack(options) as running:
        yield running
        running.assert_clean_logs()


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def nothing_of_a_failed_test(stack: LiveStack) -> AsyncIterator[None]:
    """A test that fails leaves streams and a gateway behind, and must not have the next ones fail for it."""
    yield
    await stack.clear()


def _prompt(num_tokens: int) -> list[int]:
    return random.choices(range(3, VOCAB_SIZE), k=num_tokens)


async def _whole(stack: LiveStack, *names: str) -> None:
    """Starts again what an earlier test has ended."""
    for name in ("gateway", *(names or _ALL)):
        await stack.ensure(name)
    await stack.wait_until_available(*(names or _ALL))
    await stack.assert_nothing_held(workers=names or _ALL)


async def _streaming(stack: LiveStack, max_tokens: int = _ENDLESS) -> list[LiveRequest]:
    """Four requests that have tokens and want many more, two on each decode instance."""
    streams = [stack.ask(_prompt(10), timeout_s=60.0, max_tokens=max_tokens) for _ in range(4)]
    await asyncio.gather(*(stream.tokens(5) for stream in streams))
    return streams


async def _computing(stack: LiveStack, names: tuple[str, ...] = ("prefill-0", "prefill-1")) -> list[LiveRequest]:
    """A request for each of these prefill instances whose long prompt is being computed there."""
    before = {name: (await stack.memory(name)).computed_prompt_tokens for name in names}
    requests = [stack.ask(_prompt(5000), timeout_s=60.0, **_SHORT) for _ in names]

    async def computes() -> bool:
        reports = {name: await stack.memory(name) for name in names}
        return all(report.num_active_rpcs > 0 and report.computed_prompt_tokens > before[name] for name, report in reports.items())

    await until(computes, 10.0, "prefill never began")
    return requests


async def test_frozen_processes_are_given_up_and_serve_again_when_they_wake(stack: LiveStack) -> None:
    await _whole(stack)
    streams = await _streaming(stack)
    gateway_1 = await stack.second_gateway()
    of_frozen_gateway = [stack.ask(_prompt(10), gateway_1, timeout_s=60.0, max_tokens=_ENDLESS) for _ in range(2)]
    await asyncio.gather(*(stream.tokens(5) for stream in of_frozen_gateway))
    computing = await _computing(stack)
    for name in _FROZEN:
        stack.send(name, signal.SIGSTOP)
    frozen_s = time.monotonic()

    await until(lambda: _have_ended(streams, 2), _GIVEN_UP_S + _MARGIN_S, "decode-0 is not given up")
    going_on = [stream for stream in streams if stream.code is None]
    await asyncio.gather(*(request.ended(_GIVEN_UP_S + 2 * _MARGIN_S) for request in computing))
    # A prompt may have been computed, and its few tokens sent, between the look at it and the freeze.
    came_through = [request for request in computing if request.outcome == ("OK", "") and request.ended_s < frozen_s + _UNDER_WAY_S]
    for request in (*computing, *(stream for stream in streams if stream not in going_on)):
        if request in came_through:
            continue
        if request.trailers["tandem-decode-instance"] == "decode-0":
            assert request.outcome == ("UNAVAILABLE", "DECODE_LOST")
            assert int(request.trailers.get("tandem-tokens-sent", 0)) == len(request.token_ids)
            assert request.ended_s - frozen_s < _GIVEN_UP_S + _MARGIN_S
        else:
            assert (request.outcome, request.trailers["tandem-prefill-instance"]) == (("OK", ""), "prefill-1"), "prefill-0 was frozen before it was done"
    for stream in going_on:
        await stream.tokens(len(stream.token_ids) + 5)
        stream.cancel()
    await stack.assert_nothing_held(workers=("prefill-1", "decode-1"), within_s=max(1.0, frozen_s + _GIVEN_UP_S + _MARGIN_S - time.monotonic()))
    meanwhile = await stack.ask(_prompt(20), **_SHORT).ended(5.0)
    assert (meanwhile.outcome, meanwhile.trailers["tandem-decode-instance"]) == (("OK", ""), "decode-1")

    for stream in of_frozen_gateway:  # before it wakes up: two processes that sleep at the same time give nobody up
        await stream.ended(max(1.0, frozen_s + _GIVEN_UP_S + _MARGIN_S - time.monotonic()))
        assert stream.outcome[0] == "UNAVAILABLE"

    for name in _FROZEN:
        stack.send(name, signal.SIGCONT)
    await stack.wait_until_available(*_ALL, within_s=5.0)
    await stack.assert_nothing_held()
    await until(lambda: _idle_by_report(stack), 5.0, "the gateway does not hear that all workers are idle")
    again = await asyncio.gather(*(stack.ask(_prompt(300), **_SHORT).ended() for _ in range(8)))
    assert [request.outcome for request in again] == [("OK", "")] * 8
    assert {request.trailers["tandem-decode-instance"] for request in again} == {"decode-0", "decode-1"}
    assert {request.trailers["tandem-prefill-instance"] for request in again} == {"prefill-0", "prefill-1"}
    await stack.assert_nothing_held()


async def _idle_by_report(stack: LiveStack) -> bool:
    """The router goes by reports, and one that woke up says at first how much it had before it slept."""
    return all(instance.load.prefill_backlog_tokens == instance.load.num_requests_running == 0 for instance in (await stack.status()).instances)


async def _have_ended(requests: list[LiveRequest], count: int) -> bool:
    return sum(request.code is not None for request in requests) == count


async def test_a_killed_gateway_leaves_nothing_held_in_either_pool(stack: LiveStack) -> None:
    await _whole(stack)
    streams = await _streaming(stack)
    computing = await _computing(stack)
    await stack.kill("gateway")
    await stack.assert_nothing_held(within_s=1.0, without_gateway=True)
    for request in (*streams, *computing):
        await request.ended(5.0)
        assert request.outcome[0] == "UNAVAILABLE"
    await stack.ensure("gateway")
    assert (await stack.ask([5, 6, 7]).ended()).outcome == ("OK", "")


async def test_a_gateway_told_to_end_finishes_what_it_has_and_refuses_the_rest(stack: LiveStack) -> None:
    await _whole(stack)
    streams = await _streaming(stack, max_tokens=1200)
    computing = await _computing(stack)
    stack.send("gateway", signal.SIGTERM)
    await until(lambda: _is_draining(stack), 5.0, "the gateway does not drain")
    refused = await stack.ask([5, 6, 7]).ended()
    assert refused.outcome == ("UNAVAILABLE", "DRAINING")
    assert refused.status is not None and refused.status.retry_after_s
    for request in (*streams, *computing):
        await request.ended()
        assert (request.outcome, len(request.token_ids)) == (("OK", ""), request.usage.completion_tokens)
    assert await stack.exit_code("gateway", 5.0) == 0
    await stack.assert_nothing_held(without_gateway=True)


async def _is_draining(stack: LiveStack) -> bool:
    return (await stack.status()).draining


async def _drain(stack: LiveStack, name: str, running: list[LiveRequest]) -> None:
    """SIGTERM: what the instance has ends well, what comes later goes to the other one, and the process ends with 0."""
    stack.send(name, signal.SIGTERM)
    later = [await stack.ask(_prompt(30), **_SHORT).ended() for _ in range(6)]
    for request in (*running, *later):
        await request.ended()
        assert (request.outcome, len(request.token_ids)) == (("OK", ""), request.usage.completion_tokens)
    key = f"tandem-{name.partition('-')[0]}-instance"
    assert name in {request.trailers[key] for request in running}
    assert name not in {request.trailers[key] for request in later[1:]}
    assert await stack.exit_code(name, 5.0) == 0
    await stack.assert_nothing_held()


async def test_a_prefill_instance_told_to_end_finishes_its_prompts_and_the_other_takes_the_rest(stack: LiveStack) -> None:
    await _whole(stack)
    await _drain(stack, "prefill-0", await _computing(stack))


async def test_when_one_prefill_instance_is_killed_the_other_computes_its_prompts(stack: LiveStack, reference: Reference) -> None:
    await _whole(stack)
    requests = await _computing(stack)
    await stack.kill("prefill-1")
    for request in requests:
        await request.ended()
        assert (request.outcome, request.trailers["tandem-path"]) == (("OK", ""), "handover")
        assert request.trailers["tandem-prefill-instance"] == "prefill-0"
    assert await stack.is_ready()
    prompt = _prompt(40)
    request = await stack.ask(prompt, **_SHORT).ended()
    assert (request.outcome, request.token_ids) == (("OK", ""), await reference.tokens(prompt, **_SHORT))
    await stack.assert_nothing_held()


async def test_a_decode_instance_told_to_end_finishes_its_streams_and_the_other_takes_the_rest(stack: LiveStack) -> None:
    await _whole(stack, "decode-0", "decode-1", "prefill-0")
    streams = await _streaming(stack, max_tokens=600)
    await _drain(stack, "decode-1", [*streams, *await _computing(stack, ("prefill-0",))])
