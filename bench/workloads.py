"""What is asked: lengths, and prefixes that prompts share. Rows of a trace stay whole and in their order; drawn ones come from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.trace_files import MOONCAKE_BLOCK, READERS, Row, Trace

_MOONCAKE_BUCKET_S = 3.0
_SHARED_BLOCK = 64


class WorkloadError(Exception):
    """No such workload, or one that cannot be made of what was given; the text is for the user."""


class Workload(Protocol):
    """A source of rows without an end."""

    @property
    def name(self) -> str:
        """What a report calls it."""

    @property
    def block_tokens(self) -> int:
        """Tokens to a hash id of its rows; 0: they have none."""

    @property
    def num_timed_rows(self) -> int:
        """Rows that have times, from the first one on; 0: there are no times."""

    def rows(self, random: np.random.Generator, *, from_start: bool) -> Iterator[Row]:
        """Rows in the order in which they are sent; `from_start`: as a replay wants them, else from a place that the seed chooses."""


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Rows of a public trace, over and over. Another lap shares no prefix with the one before."""

    name: str
    trace: Trace
    block_tokens: int = 0
    spread_s: float = 0.0
    """Each time is moved within so many seconds, by the seed: of a trace whose times are rounded to buckets."""

    @property
    def num_timed_rows(self) -> int:
        return len(self.trace.rows) if self.trace.rows[0].at_s is not None else 0

    def rows(self, random: np.random.Generator, *, from_start: bool) -> Iterator[Row]:
        """See Workload. Times that are spread are in order again."""
        rows = self._spread(random) if self.spread_s else self.trace.rows
        num_ids = 1 + max((max(row.hash_ids, default=-1) for row in rows), default=-1)
        first = 0 if from_start else int(random.integers(len(rows)))
        for index in count(first):
            row, lap = rows[index % len(rows)], index // len(rows)
            yield replace(row, hash_ids=tuple(each + lap * num_ids for each in row.hash_ids)) if lap and row.hash_ids else row

    def _spread(self, random: np.random.Generator) -> tuple[Row, ...]:
        moved = [replace(row, at_s=(row.at_s or 0.0) + float(random.uniform(0.0, self.spread_s))) for row in self.trace.rows]
        return tuple(sorted(moved, key=lambda row: row.at_s or 0.0))


@dataclass(frozen=True, slots=True)
class UniformWorkload:
    """Lengths drawn evenly, both ends included, one independent of the other; where a range is of one length that is fixed."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    block_tokens: int = 0
    num_timed_rows: int = 0

    def rows(self, random: np.random.Generator, *, from_start: bool) -> Iterator[Row]:
        """See Workload."""
        while True:
            yield Row(int(random.integers(self.prompt[0], self.prompt[1] + 1)), int(random.integers(self.output[0], self.output[1] + 1)))


@dataclass(frozen=True, slots=True)
class SharedPrefixWorkload:
    """Groups of prompts that begin alike: the first half of a prompt is its group's, the second its own."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    num_groups: int = 8
    block_tokens: int = _SHARED_BLOCK
    num_timed_rows: int = 0

    def rows(self, random: np.random.Generator, *, from_start: bool) -> Iterator[Row]:
        """See Workload."""
        lengths = UniformWorkload(self.name, self.prompt, self.output).rows(random, from_start=from_start)
        own_ids = count(self.num_groups * self.prompt[1])
        for row in lengths:
            num_blocks = -(-row.prompt_tokens // self.block_tokens)
            group = int(random.integers(self.num_groups)) * self.prompt[1]
            shared = range(group, group + num_blocks // 2)
            yield replace(row, hash_ids=(*shared, *(next(own_ids) for _ in range(num_blocks - len(shared)))))


_SAMPLES: Mapping[str, tuple[str, str]] = {
    "azure-conv": ("azure", "azure2023_conv.csv"),
    "azure-code": ("azure", "azure2023_code.csv"),
    "mooncake": ("mooncake", "mooncake_conversation.jsonl"),
    "arxiv": ("arxiv", "arxiv_summarization.csv"),
}
"""Format and file of bench/samples."""
_DRAWN: Mapping[str, Callable[[str, tuple[int, int], tuple[int, int]], Workload]] = {
    "fixed": UniformWorkload,
    "uniform": UniformWorkload,
    "shared-prefix": SharedPrefixWorkload,
}
_DEFAULT_PROMPT, _DEFAULT_OUTPUT = "256", "64"
NAMES = (*_SAMPLES, *_DRAWN)
"""Of workloads that need no file."""


def workload_of(name: str, *, input_len: str = "", output_len: str = "", literal: bool = False) -> Workload:
    """A workload by its name, or as FORMAT:FILE of a whole trace (azure, arxiv, burstgpt, mooncake). Raises WorkloadError, TraceFileError.

    `input_len` and `output_len`, N or A:B tokens, are of drawn workloads. `literal` keeps the buckets of three seconds that Mooncake's times are rounded to.
    """
    if name in _DRAWN:
        if literal:
            raise WorkloadError(f"{name} has no times to be taken literally")
        return _drawn(name, _range("input-len", input_len or _DEFAULT_PROMPT), _range("output-len", output_len or _DEFAULT_OUTPUT))
    if input_len or output_len:
        raise WorkloadError(f"the lengths of {name} are its trace's own: input-len and output-len are for {', '.join(_DRAWN)}")
    form, colon, file = name.partition(":")
    if colon and form in READERS:
        return _traced(f"{form}:{Path(file).name}", form, READERS[form](Path(file)), literal)
    if name not in _SAMPLES:
        raise WorkloadError(f"there is no workload {name!r}: give one of {', '.join(NAMES)}, or {'|'.join(READERS)}:FILE")
    form, sample = _SAMPLES[name]
    with resources.as_file(resources.files("bench") / "samples" / sample) as path:
        return _traced(name, form, READERS[form](path), literal)


def _traced(name: str, form: str, trace: Trace, literal: bool) -> TraceWorkload:
    if literal and form != "mooncake":
        raise WorkloadError(f"the times of {name} are literal as they are")
    if trace.num_left_out:
        name = f"{name} (without {trace.num_left_out} that had failed)"
    if form != "mooncake":
        return TraceWorkload(name, trace)
    return TraceWorkload(f"{name} (literal buckets)" if literal else name, trace, MOONCAKE_BLOCK, 0.0 if literal else _MOONCAKE_BUCKET_S)


def _drawn(name: str, prompt: tuple[int, int], output: tuple[int, int]) -> Workload:
    if name == "fixed" and (prompt[0] != prompt[1] or output[0] != output[1]):
        raise WorkloadError("fixed has one length each: A:B is for uniform and shared-prefix")
    words = [f"{low}" if low == high else f"{low}:{high}" for low, high in (prompt, output)]
    return _DRAWN[name](f"{name} {words[0]} in {words[1]} out", prompt, output)


def _range(flag: str, text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        found = int(low), int(high if colon else low)
    except ValueError:
        raise WorkloadError(f"{flag}: {text!r} is no N or A:B") from None
    if not 1 <= found[0] <= found[1]:
        raise WorkloadError(f"{flag}: {text!r} must be at least 1, the lower end first")
    return found
