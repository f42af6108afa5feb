"""`make check-models`: every architecture and every real model gives the tokens of transformers' own generate, however it is served."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch
from transformers import AutoModelForCausalLM

from checks.client import complete
from checks.cluster import running_cluster
from checks.one_engine import Prompt, Setup, run_engine
from checks.prompts import mixed_prompts
from checks.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model
from checks.tiny_tokenizers import write_tiny_tokenizer
from checks.verdict import Check, quick
from cli.stack import StackOptions
from tandem.v1 import gateway_pb2, generation_pb2

_TIMEOUT_S = 300.0
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, what it is asked, and what transformers answers."""

    name: str
    directory: Path
    prompts: list[Prompt]
    expected: list[list[int]]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(prompt.token_ids) + prompt.num_output_tokens for prompt in self.prompts)

    @property
    def num_tight_blocks(self) -> int:
        """A pool that holds each sequence, and all prompts at a time, but not what all of them grow by."""
        return max(_num_blocks(self.max_model_len), sum(_num_blocks(len(prompt.token_ids) + 1) for prompt in self.prompts))


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


@dataclass
class Score:
    """What was compared."""

    check: Check
    counts: Counter[str] = field(default_factory=Counter)

    def compare(self, subject: Subject, way: str, outputs: Sequence[list[int]]) -> None:
        """Counts equal and different completions, and says where each different one leaves the reference."""
        for prompt, expected, found in zip(subject.prompts, subject.expected, outputs, strict=True):
            self.counts["compared"] += 1
            if found != expected:
                self.counts["different"] += 1
                first = next((place for place, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), len(found))
                print(f"  {subject.name}, {way}: a prompt of {len(prompt.token_ids)} tokens leaves the reference at output token {first}", flush=True)
        print(f"  {subject.name}, {way}: {len(outputs)} completions", flush=True)


@torch.inference_mode()
def reference(directory: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """transformers' own greedy generate in float32, each prompt alone, with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager").eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=prompt.num_output_tokens, eos_token_id=None, pad_token_id=0
        )
        outputs.append([int(token) for token in output[0, ids.shape[1] :]])
    return outputs


def tiny_subject(family: str, directory: Path) -> Subject:
    """Prompts of random tokens, some of which begin alike."""
    write_tiny_tokenizer(write_tiny_model(directory / family, family))
    generator = random.Random(family)
    prompts: list[Prompt] = []
    for index in range(6 if quick() else 16):
        length = generator.choice([1, 23, 24, 25, generator.randint(2, 200)])
        shared = prompts[-1].token_ids[: length // 2] if index % 3 == 2 else ()
        own = tuple(generator.randrange(3, VOCAB_SIZE) for _ in range(length - len(shared)))
        prompts.append(Prompt(shared + own, 12 if quick() else generator.randint(8, 40)))
    return Subject(family, directory / family, prompts, reference(directory / family, prompts))


def real_subject(model: Path) -> Subject:
    """Prompts of the project's own text; the longest is longer than Gemma's window."""
    count, longest, num_output = (3, 60, 6) if quick() else (8, 700, 12)
    prompts = [Prompt(tuple(ids), num_output) for ids in mixed_prompts(model, count, longest=longest, seed=3)]
    return Subject(model.name, model, prompts, reference(model, prompts))


def setups(subject: Subject) -> list[Setup]:
    """The ways that must not matter."""
    return [
        Setup("alone", at_once=False),
        Setup("batched"),
        Setup("chunked", {"max_prefill_tokens_per_step": 24, "max_num_batched_tokens": 56}),
        Setup("preempted", {"num_blocks": subject.num_tight_blocks, "max_model_len": subject.max_model_len, "reserve_output_tokens": 1}),
        Setup("prefix hits", {"enable_prefix_caching": True}, rounds=2),
    ]


def run_in_one_engine(score: Score, subject: Subject, chosen: Sequence[Setup]) -> None:
    """Compares each way, and makes sure that it was one."""
    for setup in chosen:
        run = asyncio.run(run_engine(subject.directory, subject.prompts, setup))
        score.compare(subject, setup.name, run.outputs)
        score.counts["preemptions"] += run.num_preemptions
        score.counts["cached_tokens"] += run.num_cached_tokens
        if setup.name == "preempted":
            score.check.goal(run.num_preemptions > 0, f"{subject.name}: nothing was preempted")
        if setup.name == "prefix hits":
            score.check.goal(run.num_cached_tokens > 0, f"{subject.name}: no prefix was hit")


async def run_split(score: Score, subject: Subject) -> None:
    """Compares what three processes answer."""
    chunk = 48 if quick() else 256
    worker = f"--dtype=float32 --num-threads=1 --num-blocks=512 --max-num-seqs=32 --max-num-batched-tokens=512 --max-prefill-tokens-per-step={chunk}"
    options = StackOptions(subject.directory, prefill_args=worker, decode_args=worker)
    async with running_cluster(options, Path(f"out/check-models-{subject.name}.log")) as cluster:
        completions = await asyncio.gather(
            *(complete(cluster.gateway, _request(place, prompt), timeout_s=_TIMEOUT_S) for place, prompt in enumerate(subject.prompts))
        )
    for completion in completions:
        score.check.goal(completion.code is grpc.StatusCode.OK, f"{subject.name}: {completion.request_id} ended {completion.code.name}: {completion.details}")
    score.counts["handed_over"] += sum(completion.trailers.get("tandem-path") == "handover" for completion in completions)
    score.counts["split"] += len(completions)
    score.compare(subject, "split", [completion.token_ids for completion in completions])


def _request(place: int, prompt: Prompt) -> gateway_pb2.GenerateRequest:
    sampling = generation_pb2.SamplingParams(max_tokens=prompt.num_output_tokens, temperature=0.0, ignore_eos=True)
    return gateway_pb2.GenerateRequest(request_id=f"models-{place}", token_ids=generation_pb2.TokenIds(ids=prompt.token_ids), sampling_params=sampling)


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, action="append", required=True, help="directory of a real model; may be given several times")
    models: list[Path] = parser.parse_args().model
    check = Check("check-models")
    check.begin(f"{len(FAMILIES)} architectures and {len(models)} models against transformers' own generate, float32", seconds=360, quick_seconds=50)
    score = Score(check)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        for family in FAMILIES:
            subject = tiny_subject(family, Path(directory))
            run_in_one_engine(score, subject, setups(subject))
            if not quick() or family in ("gemma3_text", "mixtral"):
                asyncio.run(run_split(score, subject))
    for model in models:
        subject = real_subject(model)
        run_in_one_engine(score, subject, setups(subject)[1:2] if quick() else setups(subject))
        if not quick():
            asyncio.run(run_split(score, subject))
    counts = score.counts
    check.goal(counts["different"] == 0, f"{counts['different']} completions differ")
    check.goal(counts["handed_over"] == counts["split"], f"{counts['handed_over']} of {counts['split']} were handed over")
    shown = ("compared", "different", "handed_over", "preemptions", "cached_tokens")
    check.end({"architectures": len(FAMILIES), "models": len(models), **{name: counts[name] for name in shown}})


if __name__ == "__main__":
    main()
