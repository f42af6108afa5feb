"""`make check-contract`: random requests with every parameter through the split, equal to one process in float32."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings

from checks.cluster import Cluster, num_held, running_cluster
from checks.differential import Differential
from checks.fuzz_cases import Case, batches
from checks.single_process import running_single_process
from checks.tiny_models import write_tiny_model
from checks.tiny_tokenizers import write_tiny_tokenizer
from checks.verdict import Check, quick
from cli.stack import StackOptions
from tandem.v1 import load_pb2

_T = TypeVar("_T")
_CASES_PER_ROUND = 200
FAMILIES = ("llama", "gemma3_text")
"""The second has windows, soft caps and two kinds of layers."""
_NUM_LOOKS, _LOOK_S = 250, 0.02

WORKER_ARGS = "--dtype=float32 --block-size=8 --num-threads=1 --max-model-len=256"
PREFILL_ARGS = f"{WORKER_ARGS} --num-blocks=256 --max-prefill-tokens-per-step=24"
DECODE_ARGS = f"{WORKER_ARGS} --num-blocks=40 --reserve-output-tokens=1 --max-local-prefill-tokens=8"
"""A pool so small that growth preempts, and a limit that has some of the preempted computed by the prefill pool again."""

FEATURES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words_ids", "echo", "resumes", "cached", "handover", "prefill_only", "stopped_by_string", "stopped_by_token"),
)
"""Each must have been seen, or the run proves nothing of it."""


@dataclass(frozen=True, slots=True)
class FuzzRun:
    """Three processes, the reference, and the loop on which both live."""

    runner: asyncio.Runner
    cluster: Cluster
    differential: Differential

    def fuzz(self, num_batches: int, *, run_seed: int) -> None:
        """Raises AssertionError with the smallest batch found that differs."""

        @seed(run_seed)
        @settings(max_examples=num_batches, deadline=None, database=None, phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))
        @given(batches())
        def check(batch: list[Case]) -> None:
            self.runner.run(self.differential.check(batch))

        check()

    def num_left(self) -> int:
        """What is still held once the last client has its answer; bounded wait."""
        return self.runner.run(self._num_left())

    def decode_memory(self) -> load_pb2.MemoryReport:
        """Decode's counters."""
        return self.runner.run(self.cluster.memory())["decode"]

    async def _num_left(self) -> int:
        left = 1
        for _ in range(_NUM_LOOKS):
            left = sum(map(num_held, (await self.cluster.memory()).values()))
            if not left:
                break
            await asyncio.sleep(_LOOK_S)
        return left


@contextmanager
def running_fuzz(model: Path, log: Path) -> Iterator[FuzzRun]:
    """Starts everything; `log` takes the services' lines."""
    options = StackOptions(model, prefill_args=PREFILL_ARGS, decode_args=DECODE_ARGS)
    # A loop of its own and not the thread's: a test has one already.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner, ExitStack() as opened:

        def enter(context: AbstractAsyncContextManager[_T]) -> _T:
            value = runner.run(_entered(context))
            opened.callback(lambda: runner.run(_left(context)))
            return value

        cluster = enter(running_cluster(options, log))
        yield FuzzRun(runner, cluster, Differential(cluster.gateway, enter(running_single_process(model))))


async def _entered(context: AbstractAsyncContextManager[_T]) -> _T:
    return await context.__aenter__()


async def _left(context: AbstractAsyncContextManager[_T]) -> None:
    await context.__aexit__(None, None, None)


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the random requests")
    first_seed = parser.parse_args().seed
    check = Check("check-contract")
    check.begin("random requests through three processes and through one engine", seconds=600, quick_seconds=50)
    counts, seen = Counter[str](), Counter[str]()
    for family in FAMILIES[: 1 if quick() else None]:
        with TemporaryDirectory() as directory, running_fuzz(_tiny_model(Path(directory), family), Path(f"out/check-contract-{family}.log")) as run:
            _run(check, run, 100 if quick() else 1000, first_seed, family)
            memory = run.decode_memory()
            counts += Counter(preempted=memory.num_preemptions, readmitted=memory.num_readmissions, left=run.num_left())
            seen += run.differential.seen
    missing = [name for name in FEATURES if not seen[name]]
    check.goal(not missing or bool(check.goals_missed), f"never seen: {', '.join(missing)}")
    check.goal(counts["left"] == 0, f"{counts['left']} things are still held")
    check.goal(quick() or counts["preempted"] > 0, "nobody was preempted")
    check.goal(quick() or counts["readmitted"] > 0, "nobody's KV was asked of the prefill pool again")
    check.details["seen"] = dict(seen)
    check.end(
        {
            "cases": seen["cases"],
            "different": int("difference" in check.details),
            "handed_over": seen["handover"],
            "samples": seen["samples"],
            "preempted": counts["preempted"],
            "readmitted": counts["readmitted"],
            "left": counts["left"],
        }
    )


def _tiny_model(directory: Path, family: str) -> Path:
    write_tiny_model(directory, family)
    write_tiny_tokenizer(directory)
    return directory


def _run(check: Check, run: FuzzRun, wanted: int, run_seed: int, family: str) -> None:
    seen = run.differential.seen
    try:
        while seen["cases"] < wanted:
            run.fuzz(math.ceil(min(wanted - seen["cases"], _CASES_PER_ROUND) / 10), run_seed=run_seed)
            run_seed += 1
            print(f"  {family}: {seen['cases']} of {wanted} cases are equal", flush=True)
    except AssertionError as error:
        check.details["difference"] = str(error)
        check.goal(False, f"a difference with {family}: {error}")


if __name__ == "__main__":
    main()
