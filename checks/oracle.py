"""`make check-oracle`: three processes against one engine, token for token in float32, and by design rule 3 (c) in bfloat16."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc

from checks.client import Completion, complete
from checks.cluster import Cluster, running_cluster
from checks.prompts import mixed_prompts
from checks.teacher import Agreement, agreement
from checks.verdict import Check, quick
from cli.stack import StackOptions
from engine.async_engine import AsyncEngine
from engine.build import build_engine
from engine.config import Dtype, EngineConfig
from engine.errors import EngineError
from engine.events import Failed, Finished, Tokens
from engine.proto import sampling_params_from_proto
from engine.sequence import SequenceKind, SequenceSpec
from tandem.v1 import gateway_pb2, generation_pb2

_CONCURRENCY = 12
_TIMEOUT_S = 600.0
_MAX_MODEL_LEN = 4096
_MAX_LOGPROB_ERROR, _MIN_GAP, _MIN_SAME_TOP = 0.05, 0.1, 0.99


@dataclass(frozen=True, slots=True)
class SplitRun:
    """What the three processes answered, and what their pools say they did for it."""

    completions: list[Completion]
    decode_computed_tokens: int

    def count(self, path: str) -> int:
        """Requests that took this path."""
        return sum(each.trailers.get("tandem-path") == path for each in self.completions)

    @property
    def kv_bytes(self) -> int:
        """Bytes handed over."""
        return sum(int(each.trailers.get("tandem-kv-bytes", 0)) for each in self.completions)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a prefix cache."""
        return sum(each.usage.cached_tokens for each in self.completions if each.usage)


def requests(model: Path) -> list[gateway_pb2.GenerateRequest]:
    """Half greedy, half sampled, with all the filters of this version."""
    count, longest = (24, 300) if quick() else (200, 3000)
    made = []
    for index, prompt in enumerate(mixed_prompts(model, count, longest=longest, seed=20)):
        sampling = generation_pb2.SamplingParams(max_tokens=8 + index % 25, seed=1000 + index, logprobs=1, temperature=0.0)
        if index % 2:
            sampling.temperature = (0.7, 1.0, 1.3)[index % 3]
            sampling.top_p = (1.0, 0.9)[index % 4 // 2]
            sampling.top_k = (0, 50, 5)[index % 5 % 3]
            sampling.min_p = (0.0, 0.05)[index % 7 == 0]
        made.append(gateway_pb2.GenerateRequest(request_id=f"oracle-{index}", token_ids=generation_pb2.TokenIds(ids=prompt), sampling_params=sampling))
    return made


async def run_split(model: Path, dtype: Dtype, asked: list[gateway_pb2.GenerateRequest]) -> SplitRun:
    """Runs all requests through gateway, decode and prefill."""
    worker = f"--dtype={dtype} --max-model-len={_MAX_MODEL_LEN} --num-threads=1"
    options = StackOptions(model, prefill_args=worker, decode_args=worker)
    async with running_cluster(options, Path(f"out/check-oracle-{dtype}.log")) as cluster:
        places = asyncio.Semaphore(_CONCURRENCY)

        async def one(request: gateway_pb2.GenerateRequest) -> Completion:
            async with places:
                return await complete(cluster.gateway, request, timeout_s=_TIMEOUT_S)

        completions = await asyncio.gather(*(one(request) for request in asked))
        return SplitRun(list(completions), await _computed_on_decode(cluster))


async def _computed_on_decode(cluster: Cluster) -> int:
    return (await cluster.memory())["decode"].computed_prompt_tokens


async def run_single(model: Path, dtype: Dtype, asked: list[gateway_pb2.GenerateRequest]) -> list[list[int]]:
    """Runs all requests in one engine of this process, batched as they come."""
    engine = build_engine(EngineConfig(model, dtype=dtype, max_model_len=_MAX_MODEL_LEN, num_threads=2))
    await engine.start()
    try:
        return list(await asyncio.gather(*(_generate(engine, request) for request in asked)))
    finally:
        await engine.stop()


async def _generate(engine: AsyncEngine, request: gateway_pb2.GenerateRequest) -> list[int]:
    params = sampling_params_from_proto(request.sampling_params, vocab_size=engine.model.vocab_size)
    stream = engine.submit(SequenceSpec(request.request_id, tuple(request.token_ids.ids), params, SequenceKind.LOCAL))
    tokens: list[int] = []
    try:
        while True:
            for event in await stream.get():
                if isinstance(event, Tokens):
                    tokens.extend(token.token_id for token in event.tokens)
                elif isinstance(event, Finished):
                    return tokens
                elif isinstance(event, Failed):
                    raise EngineError(f"{request.request_id} failed: {event.error}")
    finally:
        engine.release(request.request_id)


def compare(check: Check, asked: list[gateway_pb2.GenerateRequest], split: SplitRun, single: list[list[int]]) -> tuple[int, int]:
    """Counts compared and different completions, and says where each different one leaves the reference."""
    compared = different = 0
    for request, completion, expected in zip(asked, split.completions, single, strict=True):
        if completion.code is not grpc.StatusCode.OK:
            check.goal(False, f"{request.request_id} ended {completion.code.name}: {completion.details}")
            continue
        compared += 1
        if completion.token_ids != expected:
            different += 1
            pairs = zip(completion.token_ids, expected, strict=False)
            first = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(completion.token_ids), len(expected)))
            print(f"  {request.request_id}: {len(request.token_ids.ids)} prompt tokens, leaves the reference at output token {first}", flush=True)
    return compared, different


def judge_bfloat16(check: Check, found: Agreement) -> None:
    """Rule 3 (c)."""
    check.details["bfloat16"] = found.as_dict()
    print(f"  bfloat16: {found}", flush=True)
    check.goal(found.mean_error <= _MAX_LOGPROB_ERROR, f"bfloat16 logprob error {found.mean_error:.4f} > {_MAX_LOGPROB_ERROR}")
    check.goal(found.same_top >= _MIN_SAME_TOP, f"bfloat16 same top token in {found.same_top:.4f} of positions with a gap over {_MIN_GAP}")


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    model = parser.parse_args().model
    check = Check("check-oracle")
    check.begin("prompts through three processes and through one engine, float32 and bfloat16", seconds=1200, quick_seconds=50)
    asked = requests(model)
    split = asyncio.run(run_split(model, "float32", asked))
    compared, different = compare(check, asked, split, asyncio.run(run_single(model, "float32", asked)))
    check.goal(different == 0, f"{different} completions differ")
    check.goal(split.cached_tokens > 0, "no prefix was hit")
    check.goal(split.kv_bytes > 0, "no KV was moved")
    check.goal(split.count("handover") == len(asked), f"{split.count('handover')} of {len(asked)} were handed over")
    check.goal(split.decode_computed_tokens == 0, f"decode computed {split.decode_computed_tokens} prompt tokens")
    half = asyncio.run(run_split(model, "bfloat16", asked))
    judge_bfloat16(check, agreement(model, asked, half.completions, min_gap=_MIN_GAP))
    check.end(
        {
            "compared": compared,
            "different": different,
            "handed_over": split.count("handover"),
            "local_prefill": split.count("local") + split.count("local_fallback"),
            "bytes": split.kv_bytes,
            "computed_prompt_tokens_on_decode": split.decode_computed_tokens,
            "cached_tokens": split.cached_tokens,
        }
    )


if __name__ == "__main__":
    main()
