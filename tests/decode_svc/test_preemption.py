"""A sample that gave its blocks back comes back by what is cheaper: a short one is computed here, a long one by the prefill pool, and no stream changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from decode_svc.pool import FailurePolicy
from decode_svc.readmission import Readmission
from engine.limits import EngineLimits
from rpc.errors import StatusError
from rpc.failpoints import configure_failpoints
from tests.support.alone import alone_streams
from tests.support.cluster import Cluster, open_cluster, until
from tests.support.phases import IN_PREFILL, gate_prefill, open_gates
from tests.support.running import Running

PROMPT = list(range(100, 117))
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 24}
LIMIT = 10
"""Tokens that decode computes again by itself; a whole sample has 17 and more."""


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    configure_failpoints("")


def _decode_options(num_blocks: int, *, caching: bool = True) -> dict[str, Any]:
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=32, max_prefill_tokens_per_step=8, reserve_output_tokens=4, enable_prefix_caching=caching)
    return {"num_blocks": num_blocks, "limits": limits}


async def _both(cluster: Cluster, prefill: str, n: int) -> None:
    """Two requests at once, whose samples take each other's blocks."""
    prompts, engine = [PROMPT, [number + 500 for number in PROMPT]], cluster.decode.engine
    gate = cluster.decode.device.gate = threading.Event()
    running = [asyncio.ensure_future(cluster.generate(cluster.request(prompt, prefill=prefill, n=n, **WARM))) for prompt in prompts]
    await until(lambda: engine.load().num_running + n * engine.load().num_waiting == 2 * n)
    gate.set()
    for prompt, task in zip(prompts, running, strict=True):
        assert (await task).streams == alone_streams(prompt, n=n, **WARM)
    await cluster.assert_nothing_held()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_short_sample_is_computed_again_here(n: int, caching: bool) -> None:
    async with open_cluster(decode_options=_decode_options({1: 16, 3: 34}[n], caching=caching)) as cluster:
        await _both(cluster, "p0", n)
        report = await cluster.decode.engine.report()
        assert report.num_preemptions > 0
        assert report.num_readmissions == 0
        assert report.computed_prompt_tokens > 0


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_long_sample_comes_back_through_the_prefill_pool(n: int, transport: str) -> None:
    options = _decode_options({1: 16, 3: 34}[n], caching=False)
    policy = FailurePolicy(max_local_prefill_tokens=LIMIT)
    async with open_cluster(transports=[transport], decode_options=options, policy=policy) as cluster:
        await _both(cluster, "p0", n)
        report = await cluster.decode.engine.report()
        assert report.num_readmissions == report.num_preemptions > 0
        assert report.computed_prompt_tokens == 0


async def test_cached_blocks_are_not_copied_again() -> None:
    policy = FailurePolicy(max_local_prefill_tokens=0)
    async with open_cluster(decode_options=_decode_options(16), policy=policy) as cluster:
        await _both(cluster, "p0", 1)
        report = await cluster.decode.engine.report()
        assert report.num_readmissions > 0
        assert report.computed_prompt_tokens <= report.num_preemptions  # only the last token of one that is cached whole


@pytest.mark.parametrize("n", [1, 3])
async def test_a_prompt_computed_here_comes_back_through_the_prefill_pool_too(n: int) -> None:
    options = _decode_options({1: 16, 3: 34}[n], caching=False)
    async with open_cluster(decode_options=options, policy=FailurePolicy(max_local_prefill_tokens=LIMIT)) as cluster:
        await _both(cluster, "", n)
        report = await cluster.decode.engine.report()
        assert report.num_readmissions > 0
        assert report.computed_prompt_tokens == 2 * len(PROMPT)


async def test_decode_without_a_prefill_pool_computes_every_sample_again_itself() -> None:
    policy = FailurePolicy(max_local_prefill_tokens=LIMIT)
    async with open_cluster(num_prefills=0, decode_options=_decode_options(16, caching=False), policy=policy) as cluster:
        await _both(cluster, "", 1)
        report = await cluster.decode.engine.report()
        assert (report.num_preemptions > 0, report.num_readmissions) == (True, 0)


# While it comes back. When each of the three has 33 tokens, 4 shared blocks and 5 own ones each are more than the 18 of the pool: the third gives way.
# The first one stops two tokens later, so that the third comes back while the second goes on.

STREAMS = alone_streams(PROMPT, n=3, **WARM)
STOP = STREAMS[0][18]
THREE: dict[str, Any] = {"n": 3, "stop_token_ids": frozenset({STOP}), **WARM}


def _at_readmission(monkeypatch: pytest.MonkeyPatch, arrange: Callable[[], Awaitable[None]]) -> asyncio.Event:
    """Has `arrange` run when the first sample comes back, in front of the first word to prefill; set then."""
    began, run = asyncio.Event(), Readmission.run

    async def arranged(readmission: Readmission) -> None:
        if not began.is_set():
            await arrange()
            began.set()
        await run(readmission)

    monkeypatch.setattr(Readmission, "run", arranged)
    return began


@asynccontextmanager
async def _small_cluster(**options: Any) -> AsyncIterator[Cluster]:
    policy = FailurePolicy(max_local_prefill_tokens=0)
    async with open_cluster(policy=policy, decode_options=_decode_options(18), **options) as cluster:
        yield cluster


async def test_the_other_samples_go_on_while_one_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _small_cluster() as cluster:

        async def gate() -> None:
            gate_prefill(cluster)

        began = _at_readmission(monkeypatch, gate)
        running = Running(cluster, cluster.request(PROMPT, **THREE))
        await asyncio.wait_for(began.wait(), 5)
        await until(lambda: 1 in running.answer.finishes)
        assert (await cluster.decode.engine.report()).sequences_by_state == {"waiting_for_kv": 1}
        assert sorted(running.answer.finishes) == [0, 1]
        configure_failpoints("")
        open_gates(cluster)
        assert (await running.task).streams == alone_streams(PROMPT, **THREE)
        assert (await cluster.decode.engine.report()).computed_prompt_tokens == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize("phase", IN_PREFILL)
async def test_a_client_that_leaves_while_a_sample_comes_back_leaves_nothing_held(
    phase: str, end: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange, reached = IN_PREFILL[phase]
    async with _small_cluster(transports=[transport]) as cluster:

        async def arranged() -> None:
            arrange(cluster)

        began = _at_readmission(monkeypatch, arranged)
        running = Running(cluster, cluster.request(PROMPT, **THREE), 1.0 if end == "deadline" else 20.0)
        await asyncio.wait_for(began.wait(), 5)
        await until(lambda: reached(cluster))
        if end == "cancel":
            running.call.cancel()
            await asyncio.wait({running.task})
            assert running.task.cancelled()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await running.task
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        configure_failpoints("")
        open_gates(cluster)
        await cluster.assert_nothing_held()
        assert (await cluster.generate(cluster.request(PROMPT, **THREE))).streams == alone_streams(PROMPT, **THREE)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize("phase", IN_PREFILL)
async def test_prefill_dying_while_a_sample_comes_back_costs_no_token(phase: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrange, reached = IN_PREFILL[phase]
    async with _small_cluster(num_prefills=2, transports=[transport]) as cluster:

        async def arranged() -> None:
            arrange(cluster)

        began = _at_readmission(monkeypatch, arranged)
        running = Running(cluster, cluster.request(PROMPT, **THREE))
        await asyncio.wait_for(began.wait(), 5)
        await until(lambda: reached(cluster))
        configure_failpoints("")
        await cluster.prefills[0].kill()
        open_gates(cluster)
        assert (await asyncio.wait_for(running.task, 10)).streams == alone_streams(PROMPT, **THREE)
        assert len(running.answer.prompts) == 1
        assert (await cluster.prefills[1].engine.report()).computed_prompt_tokens > len(PROMPT)
        assert (await cluster.decode.engine.report()).computed_prompt_tokens == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("num_prefills", [1, 2])
async def test_with_no_prefill_instance_left_the_hand_over_fails_cleanly(num_prefills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _small_cluster(num_prefills=num_prefills) as cluster:

        async def kill() -> None:
            for node in cluster.prefills:
                await node.kill()

        _at_readmission(monkeypatch, kill)
        running = Running(cluster, cluster.request(PROMPT, **THREE))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(running.task, 10)
        status = StatusError.of(failed.value)
        assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "HANDOVER_FAILED")
        assert f"{num_prefills} attempts failed" in status.message
        await cluster.assert_nothing_held()
        expected = alone_streams(PROMPT, **THREE)
        assert all(expected[index][: len(tokens)] == tokens for index, tokens in running.answer.samples.items())
