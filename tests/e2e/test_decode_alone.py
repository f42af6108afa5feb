"""Without prefill instances a gateway and a decode worker serve alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.live_stack import LiveStack, live_stack, options_of
from tests.support.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(served_model: Path) -> AsyncIterator[LiveStack]:
    async with live_stack(options_of(served_model, num_prefill=0)) as running:
        yield running
        await running.assert_nothing_held()
        running.assert_clean_logs()


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 30])
async def test_decode_computes_prompts_itself_and_says_so(alone: LiveStack, reference: Reference, max_tokens: int) -> None:
    prompt = list(range(40, 90))
    request = await alone.ask(prompt, max_tokens=max_tokens, temperature=0.8).ended()
    assert request.outcome == ("OK", "")
    assert request.token_ids == (await reference.tokens(prompt, max_tokens=max(max_tokens, 1), temperature=0.8))[:max_tokens]
    assert request.trailers["tandem-path"] == "local"
    assert "tandem-prefill-instance" not in request.trailers
    assert request.trailers.get("tandem-kv-bytes", "0") == "0"


async def test_many_at_once_are_served_in_full(alone: LiveStack, reference: Reference) -> None:
    requests = await asyncio.gather(*(alone.ask([index, 7, 8, 9] * 20, max_tokens=10).ended() for index in range(3, 27)))
    for index, request in enumerate(requests, start=3):
        assert (request.outcome, request.token_ids) == (("OK", ""), await reference.tokens([index, 7, 8, 9] * 20, max_tokens=10))
