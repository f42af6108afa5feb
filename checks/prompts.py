"""Prompts of natural text with forced prefix hits, the same on every machine."""

from __future__ import annotations

import math
import random
from pathlib import Path

from tokenizers import Tokenizer

_TEXTS = ("docs/design.md", "LICENSE")


def corpus(model: Path) -> list[int]:
    """Token ids of the project's own documents."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n\n".join(Path(name).read_text() for name in _TEXTS)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def mixed_prompts(model: Path, count: int, *, longest: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, log-uniform; every third one shares a prefix with the one before, every ninth repeats it whole."""
    generator = random.Random(seed)
    tokens = corpus(model)
    while len(tokens) < 2 * longest:
        tokens += tokens
    prompts: list[list[int]] = []
    for index in range(count):
        length = longest if index == 0 else 1 if index == 1 else round(math.exp(generator.uniform(0, math.log(longest))))
        first = generator.randrange(len(tokens) - length)
        prompt = tokens[first : first + length]
        if index % 3 == 2:
            before = prompts[-1]
            kept = len(before) if index % 9 == 8 else generator.randint(1, len(before))
            prompt = (before[:kept] + prompt)[: max(kept, length)][:longest] if index % 9 != 8 else list(before)
        prompts.append(prompt)
    return prompts
