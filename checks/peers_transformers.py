"""`python -m checks.peers_transformers`: transformers' own continuous batching on the prompts of a cell, in one process, without a server.

Prints one line of JSON: from when the first request was taken up to the end of the last one, by transformers' own clock; loading, set-up and warm-up are left
out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from checks.peers_cells import EIGHT
from checks.peers_floor import Size

_NO_TOKEN = -1
"""An end that never comes."""
_PAGE_TOKENS = 256
_WARM_UP_TOKENS, _WARM_UP_SEED = 4, 2_000_000


def _generate(model: Any, prompts: list[list[int]], concurrency: int, max_tokens: int) -> list[Any]:
    config = transformers.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
    pages = concurrency * (-(-(len(prompts[0]) + max_tokens) // _PAGE_TOKENS) + 1)
    batching = transformers.ContinuousBatchingConfig(allow_block_sharing=False, max_requests_per_batch=concurrency, page_size=_PAGE_TOKENS, num_blocks=pages)
    return list(model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching).values())


def main() -> None:
    """Runs one cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    vocab_size = Size.of(arguments.model).vocab_size
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def prompts(seed: int) -> list[list[int]]:
        return [list(map(int, request.prompt_token_ids)) for request in EIGHT.plan(vocab_size, seed).requests]

    _generate(model, prompts(_WARM_UP_SEED)[: EIGHT.concurrency], EIGHT.concurrency, _WARM_UP_TOKENS)
    done = _generate(model, prompts(arguments.seed), EIGHT.concurrency, EIGHT.output_tokens)
    wrong = [each.error or f"{len(each.generated_tokens)} tokens" for each in done if each.error or len(each.generated_tokens) != EIGHT.output_tokens]
    if wrong or len(done) != EIGHT.num_requests:
        raise SystemExit(f"{len(done)} of {EIGHT.num_requests} answers, not what was asked for: {wrong[:3]}")
    seconds = max(each.lifespan[1] for each in done) - min(each.lifespan[0] for each in done)
    print(json.dumps({"seconds": seconds, "output_tokens": sum(len(each.generated_tokens) for each in done)}))


if __name__ == "__main__":
    main()
