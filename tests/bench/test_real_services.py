"""The runner against gateway, prefill and decode as processes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from bench.plan import Loop, Plan, PlannedRequest
from bench.record import Outcome
from bench.runner import RunLimits, Runner
from bench.tandem_target import TandemTarget
from checks.tiny_models import VOCAB_SIZE
from tests.bench.scripted import WAIT_S
from tests.support.live_stack import live_stack, options_of
from tests.support.served_models import write_served_model


def _requests(num: int, num_prompt: int, max_tokens: int, rate_per_s: float | None) -> tuple[PlannedRequest, ...]:
    draw = random.Random(5)
    prompts = [tuple(draw.choices(range(3, VOCAB_SIZE), k=num_prompt)) for _ in range(num)]
    due = [None if rate_per_s is None else index / rate_per_s for index in range(num)]
    return tuple(PlannedRequest(index, prompt, max_tokens, at_s) for index, (prompt, at_s) in enumerate(zip(prompts, due, strict=True)))


async def test_real_services_are_loaded_refuse_what_is_too_much_and_keep_nothing(tmp_path: Path) -> None:
    model = write_served_model(tmp_path / "model")
    options = options_of(model, gateway="--max-active-requests=2 --max-queue-requests=1")
    async with live_stack(options) as stack:
        target = TandemTarget(stack.stack.addresses["gateway"])
        await target.open()
        try:
            plan = Plan(_requests(6, 40, 8, rate_per_s=4.0), Loop.OPEN, "fixed", "even 4/s", 1.0, 0)
            measured = await asyncio.wait_for(Runner(plan, target, RunLimits(sample_every_s=0.2)).run(), 3 * WAIT_S)
            assert [record.outcome for record in measured.records] == [Outcome.OK] * 6, measured.records
            assert all((record.num_output_tokens, record.finish_reason, record.path) == (8, "length", "handover") for record in measured.records)
            assert all(sum(each.num_tokens for each in record.arrived) == 8 for record in measured.records)
            assert measured.cold_start["ttft_s"] > 0 and {sample.kv_usage is None for sample in measured.samples} == {False}

            assert (await target.describe())["vocab_size"] == str(VOCAB_SIZE)

            crowd = Plan(_requests(8, 40, 200, rate_per_s=None), Loop.CLOSED, "fixed", "concurrency 8", 1.0, 0, 8)
            measured = await asyncio.wait_for(Runner(crowd, target, cold_start=False).run(), 3 * WAIT_S)
            refused = [record for record in measured.records if record.outcome is Outcome.REFUSED]
            assert refused and all("QUEUE_FULL" in record.error and not record.arrived for record in refused)
            assert {record.outcome for record in measured.records} == {Outcome.OK, Outcome.REFUSED}

            leaving = Runner(Plan(_requests(2, 40, 400, None), Loop.CLOSED, "fixed", "concurrency 2", 1.0, 0, 2), target, RunLimits(request_s=0.2))
            measured = await asyncio.wait_for(leaving.run(), 3 * WAIT_S)
            assert Outcome.TIMEOUT in {record.outcome for record in measured.records}
            await stack.assert_nothing_held()
        finally:
            await target.close()
