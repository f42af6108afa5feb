"""Two prefill and two decode instances: those that freeze, die or drain cost what is theirs, and the others go on."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.live_request import LiveRequest
from tests.support.live_stack import LiveStack, live_stack, options_of, until
from tests.support.reference import Reference
from tests.support.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")
_ALL = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_GIVEN_UP_S = 9.0
"""Design trap 7: 4 s until the ping and 4 s for its answer."""
_MARGIN_S = 3.0
_STREAM = {"max_tokens": 3000, "temperature": 0.8}
_SHORT = {"max_tokens": 10, "temperature": 0.8}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(served_model: Path) -> AsyncIterator[LiveStack]:
    options = options_of(served_model, num_prefill=2, num_decode=2, prefill="--max-prefill-tokens-per-step=8", decode="--max-local-prefill-tokens=0")
    async with live_stack(options) as running:
        yield running
        running.assert_clean_logs()


def _prompt(num_tokens: int) -> list[int]:
    return random.choices(range(3, VOCAB_SIZE), k=num_tokens)


async def _whole(stack: LiveStack) -> None:
    for name in ("gateway", *_ALL):
        await stack.ensure(name)
    await stack.wait_until_available(*_ALL)


async def _computing(stack: LiveStack, names: tuple[str, ...] = ("prefill-0", "prefill-1")) -> list[LiveRequest]:
    """Requests whose long prompts are being computed on all these prefill instances."""
    before = {name: (await stack.memory(name)).computed_prompt_tokens for name in names}
    requests = [stack.ask(_prompt(2500), timeout_s=60.0, **_SHORT) for _ in range(2 * len(names))]

    async def computes() -> bool:
        reports = {name: await stack.memory(name) for name in names}
        return all(report.num_active_rpcs > 0 and report.computed_prompt_tokens > before[name] for name, report in reports.items())

    await until(computes, 10.0, "prefill never began")
    return requests


async def test_frozen_peers_are_given_up_and_serve_again_when_they_wake(stack: LiveStack) -> None:
    await _whole(stack)
    streams = [stack.ask(_prompt(10), timeout_s=60.0, **_STREAM) for _ in range(4)]
    await asyncio.gather(*(stream.tokens(5) for stream in streams))
    computing = await _computing(stack)
    for name in ("prefill-0", "decode-0"):
        stack.send(name, signal.SIGSTOP)
    frozen_s = time.monotonic()
    everyone = [*streams, *computing]
    await asyncio.gather(*(request.ended(30.0) for request in everyone))

    on_decode = Counter(request.trailers["tandem-decode-instance"] for request in streams)
    assert on_decode == {"decode-0": 2, "decode-1": 2}
    for request in everyone:
        if request.trailers["tandem-decode-instance"] == "decode-0":
            assert request.outcome == ("UNAVAILABLE", "DECODE_LOST")
            assert int(request.trailers.get("tandem-tokens-sent", 0)) == len(request.token_ids)
            assert request.ended_s - frozen_s < _GIVEN_UP_S + _MARGIN_S
        else:
            assert request.outcome == ("OK", "")
    survivors = [request for request in computing if request.outcome[0] == "OK"]
    assert {request.trailers["tandem-prefill-instance"] for request in survivors} <= {"prefill-1"}, "prefill-0 was frozen before it was done"
    assert all(request.ended_s - frozen_s < _GIVEN_UP_S + 2 * _MARGIN_S for request in survivors)
    await stack.assert_nothing_held(workers=("prefill-1", "decode-1"), within_s=1.0)
    meanwhile = await stack.ask(_prompt(20), **_SHORT).ended(5.0)
    assert (meanwhile.outcome, meanwhile.trailers["tandem-decode-instance"]) == (("OK", ""), "decode-1")

    for name in ("prefill-0", "decode-0"):
        stack.send(name, signal.SIGCONT)
    await stack.wait_until_available(*_ALL, within_s=5.0)
    await stack.assert_nothing_held()
    again = await asyncio.gather(*(stack.ask(_prompt(300), **_SHORT).ended() for _ in range(8)))
    assert [request.outcome for request in again] == [("OK", "")] * 8
    assert {request.trailers["tandem-decode-instance"] for request in again} == {"decode-0", "decode-1"}
    assert {request.trailers["tandem-prefill-instance"] for request in again} == {"prefill-0", "prefill-1"}
    await stack.assert_nothing_held()


async def test_a_killed_gateway_leaves_nothing_held_in_either_pool(stack: LiveStack) -> None:
    await _whole(stack)
    streams = [stack.ask(_prompt(10), **_STREAM) for _ in range(4)]
    await asyncio.gather(*(stream.tokens(5) for stream in streams))
    computing = await _computing(stack)
    await stack.kill("gateway")
    await stack.assert_nothing_held(within_s=1.0, without_gateway=True)
    for request in (*streams, *computing):
        await request.ended(5.0)
        assert request.outcome[0] == "UNAVAILABLE"
    await stack.assert_no_late_steps()
    await stack.ensure("gateway")
    assert (await stack.ask([5, 6, 7]).ended()).outcome == ("OK", "")


async def test_a_gateway_told_to_end_finishes_what_it_has_and_refuses_the_rest(stack: LiveStack) -> None:
    await _whole(stack)
    streams = [stack.ask(_prompt(10), max_tokens=600) for _ in range(4)]
    await asyncio.gather(*(stream.tokens(5) for stream in streams))
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


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
async def test_a_worker_told_to_end_finishes_what_it_has_and_others_take_the_rest(stack: LiveStack, name: str) -> None:
    await _whole(stack)
    streams = [stack.ask(_prompt(10), max_tokens=600) for _ in range(4)]
    await asyncio.gather(*(stream.tokens(5) for stream in streams))
    running = [*streams, *await _computing(stack)]
    stack.send(name, signal.SIGTERM)
    later = []
    for _ in range(6):
        later.append(await stack.ask(_prompt(30), **_SHORT).ended())
    for request in (*running, *later):
        await request.ended()
        assert (request.outcome, len(request.token_ids)) == (("OK", ""), request.usage.completion_tokens)
    key = f"tandem-{name.partition('-')[0]}-instance"
    assert name in {request.trailers[key] for request in running}
    assert {request.trailers[key] for request in later[1:]} == {name.replace("1", "0")}
    assert await stack.exit_code(name, 5.0) == 0
    await stack.assert_nothing_held()


async def test_when_one_prefill_instance_is_killed_the_other_computes_its_prompts(stack: LiveStack, reference: Reference) -> None:
    await _whole(stack)
    requests = await _computing(stack)
    await stack.kill("prefill-0")
    for request in requests:
        await request.ended()
        assert (request.outcome, request.trailers["tandem-path"]) == (("OK", ""), "handover")
        assert request.trailers["tandem-prefill-instance"] == "prefill-1"
    assert await stack.is_ready()
    prompt = _prompt(40)
    request = await stack.ask(prompt, **_SHORT).ended()
    assert (request.outcome, request.token_ids) == (("OK", ""), await reference.tokens(prompt, **_SHORT))
    await stack.assert_nothing_held()
