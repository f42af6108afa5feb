"""The target that the flags name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.flags import UsageError
from bench.openai_target import Detokenize, OpenAIOptions, OpenAITarget
from bench.options import ServerOptions
from bench.tandem_target import TandemTarget
from bench.target import Target


def target_of(options: ServerOptions, seed: int) -> Target:
    """Not opened yet. Raises UsageError for a tokenizer that cannot be read, TargetError for what does not go together."""
    if options.backend == "tandem":
        return TandemTarget(options.address, model=options.model, temperature=options.temperature, seed=seed)
    openai = OpenAIOptions(
        model=options.model,
        endpoint=options.endpoint,
        detokenize=None if options.tokenizer is None else _detokenize(options.tokenizer),
        ignore_eos=options.ignore_eos,
        continuous_usage=options.continuous_usage,
        temperature=options.temperature,
        seed=seed,
        headers=options.headers,
        extra_body=options.extra_body,
    )
    return OpenAITarget(options.address, openai)


def _detokenize(folder: Path) -> Detokenize:
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise UsageError(f"--tokenizer: cannot read {path}: {error}") from None

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(map(int, token_ids)), skip_special_tokens=False))

    return text
