"""`make check-contract`: random requests with every parameter through the split, equal to one process in float32."""

from __future__ import annotations

import argparse
import asyncio
import math
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from checks.cluster import Cluster, num_held, running_cluster
from checks.differential import Differential
from checks.fuzz_cases import Case, batches
from checks.single_process import running_single_process
from checks.verdict import Check, quick
from cli.stack import StackOptions

WORKER_ARGS = "--dtype=float32 --block-size=8 --num-threads=1 --max-model-len=256"
PREFILL_ARGS = f"{WORKER_ARGS} --num-blocks=256 --max-prefill-tokens-per-step=24"
DECODE_ARGS = f"{WORKER_ARGS} --num-blocks=44 --reserve-output-tokens=2 --max-local-prefill-tokens=40"
"""A pool so small that growth preempts, and a limit that has some of the preempted computed by the prefill pool again."""

FEATURES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words_ids", "echo", "resumes", "cached", "handover", "prefill_only", "stopped_by_string", "stopped_by_token"),
)
"""Each must have been seen, or the run proves nothing of it."""


def fuzz(runner: asyncio.Runner, differential: Differential, num_batches: int, *, run_seed: int) -> None:
    """Raises AssertionError with the smallest batch found that differs."""

    @seed(run_seed)
    @settings(max_examples=num_batches, deadline=None, database=None, phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))
    @given(batches())
    def check(batch: list[Case]) -> None:
        runner.run(differential.check(batch))

    check()


async def _num_left(cluster: Cluster) -> int:
    """What is still held once the last client has its answer; bounded wait."""
    for _ in range(250):
        left = sum(map(num_held, (await cluster.memory()).values()))
        if not left:
            return 0
        await asyncio.sleep(0.02)
    return left


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of a small model with a tokenizer")
    parser.add_argument("--seed", type=int, default=1, help="of the random requests")
    arguments = parser.parse_args()
    check = Check("check-contract")
    check.begin("random requests through three processes and through one engine", seconds=420, quick_seconds=45)
    wanted = 200 if quick() else 2000
    with asyncio.Runner() as runner:
        stack = running_cluster(StackOptions(arguments.model, prefill_args=PREFILL_ARGS, decode_args=DECODE_ARGS), Path("out/check-contract.log"))
        reference = running_single_process(arguments.model)
        cluster = runner.run(stack.__aenter__())
        try:
            differential = Differential(cluster.gateway, runner.run(reference.__aenter__()))
            try:
                _run(check, runner, differential, wanted, arguments.seed)
                memory = runner.run(cluster.memory())
                left = runner.run(_num_left(cluster))
            finally:
                runner.run(reference.__aexit__(None, None, None))
        finally:
            runner.run(stack.__aexit__(None, None, None))
    check.goal(left == 0, f"{left} things are still held")
    num_preemptions = memory["decode"].num_preemptions
    check.goal(num_preemptions > 0, "nobody was preempted")
    check.goal(quick() or memory["decode"].num_readmissions > 0, "nobody's KV was asked of the prefill pool again")
    seen = differential.seen
    check.details["seen"] = dict(seen)
    check.end(
        {
            "cases": seen["cases"],
            "different": int("difference" in check.details),
            "handed_over": seen["handover"],
            "preempted": num_preemptions,
            "readmitted": memory["decode"].num_readmissions,
            "left": left,
        }
    )


def _run(check: Check, runner: asyncio.Runner, differential: Differential, wanted: int, first_seed: int) -> None:
    run_seed = first_seed
    try:
        while (done := differential.seen["cases"]) < wanted:
            fuzz(runner, differential, math.ceil((wanted - done) / 8), run_seed=run_seed)
            run_seed += 1
            print(f"  {differential.seen['cases']} of {wanted} cases are equal", flush=True)
    except AssertionError as error:
        check.details["difference"] = str(error)
        check.goal(False, f"a difference: {error}")
    missing = [name for name in FEATURES if not differential.seen[name]]
    check.goal(not missing or bool(check.goals_missed), f"never seen: {', '.join(missing)}")


if __name__ == "__main__":
    main()
