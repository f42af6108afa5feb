"""Public request traces in their own formats. Sources, licences and what each of them is: bench/samples/README.md."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

_MAX_TOKENS = 10_000_000
"""Of one request: what is above it is no length."""
_AZURE_TICKS = 10_000_000
"""To a second: its times have seven digits behind the point, more than a float holds beside a date."""


class TraceFileError(Exception):
    """A file that is no trace of this format; names file, line and column."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. Its lengths belong together and are never drawn apart."""

    prompt_tokens: int
    output_tokens: int
    at_s: float | None = None
    """Seconds from the first row; None where the trace has no times."""
    hash_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks of 512 tokens: equal leading ids are equal leading tokens."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in the order of the file."""

    rows: tuple[Row, ...]
    num_left_out: int = 0
    """Rows of requests that had failed, which have no tokens."""


def read_azure(path: Path) -> Trace:
    """Azure LLM inference traces of 2023: TIMESTAMP with seven digits of a second, ContextTokens, GeneratedTokens. Raises TraceFileError."""
    rows, times = [], _Times(path, "TIMESTAMP")
    for line, record in _csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        at_s = times.from_first(line, _told(path, line, "TIMESTAMP", record["TIMESTAMP"], _azure_ticks)) / _AZURE_TICKS
        rows.append(Row(_tokens(path, line, record, "ContextTokens"), _tokens(path, line, record, "GeneratedTokens"), at_s))
    return Trace(_some(path, rows))


def read_arxiv(path: Path) -> Trace:
    """Lengths of arXiv summarisation: num_prefill_tokens, num_decode_tokens; no times. Raises TraceFileError."""
    lines = _csv(path, ("num_prefill_tokens", "num_decode_tokens"))
    rows = [Row(_tokens(path, line, record, "num_prefill_tokens"), _tokens(path, line, record, "num_decode_tokens")) for line, record in lines]
    return Trace(_some(path, rows))


def read_burstgpt(path: Path) -> Trace:
    """BurstGPT, by the names of its columns, of which later releases have more. Rows of 0 tokens are requests that failed. Raises TraceFileError."""
    rows, times, num_left_out = [], _Times(path, "Timestamp"), 0
    for line, record in _csv(path, ("Timestamp", "Request tokens", "Response tokens")):
        lengths = [_told(path, line, name, record[name], _whole) for name in ("Request tokens", "Response tokens")]
        if 0 in lengths:
            num_left_out += 1
            continue
        at_s = times.from_first(line, _told(path, line, "Timestamp", record["Timestamp"], _number))
        rows.append(Row(lengths[0], lengths[1], at_s))
    return Trace(_some(path, rows), num_left_out)


def read_mooncake(path: Path) -> Trace:
    """Mooncake, a JSON object a line: timestamp in milliseconds, input_length, output_length, hash_ids. Raises TraceFileError."""
    rows, times = [], _Times(path, "timestamp")
    for line, record in _json_lines(path, ("timestamp", "input_length", "output_length", "hash_ids")):
        prompt, output = _tokens(path, line, record, "input_length"), _tokens(path, line, record, "output_length")
        at_s = times.from_first(line, _told(path, line, "timestamp", record["timestamp"], _number)) / 1000
        ids = record["hash_ids"]
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise TraceFileError(f"{path}:{line}: hash_ids must be a list of whole numbers")
        if len(ids) != math.ceil(prompt / MOONCAKE_BLOCK):
            raise TraceFileError(f"{path}:{line}: hash_ids has {len(ids)} ids for {prompt} tokens of input_length, in blocks of {MOONCAKE_BLOCK}")
        rows.append(Row(prompt, output, at_s, tuple(ids)))
    return Trace(_some(path, rows))


MOONCAKE_BLOCK = 512
"""Tokens to a hash id."""
READERS: Mapping[str, Callable[[Path], Trace]] = {"azure": read_azure, "arxiv": read_arxiv, "burstgpt": read_burstgpt, "mooncake": read_mooncake}
"""By the name of the format."""


def _csv(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise TraceFileError(f"{path}:1: has no column {', '.join(missing)}")
            for record in reader:
                if any(record[column] is None for column in columns):
                    raise TraceFileError(f"{path}:{reader.line_num}: has fewer columns than the first line")
                yield reader.line_num, record
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceFileError(f"{path}: {error}") from None


def _json_lines(path: Path, keys: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, object]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, 1):
                try:
                    record = json.loads(text)
                except ValueError as error:
                    raise TraceFileError(f"{path}:{line}: no JSON: {error}") from None
                missing = [key for key in keys if not isinstance(record, dict) or key not in record]
                if missing:
                    raise TraceFileError(f"{path}:{line}: has no {', '.join(missing)}")
                yield line, record
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: {error}") from None


def _told(path: Path, line: int, column: str, value: object, read: Callable[[object], _T]) -> _T:
    try:
        return read(value)
    except (ValueError, TypeError) as error:
        raise TraceFileError(f"{path}:{line}: {column}: {error}") from None


def _tokens(path: Path, line: int, record: Mapping[str, object], column: str) -> int:
    found = _told(path, line, column, record[column], _whole)
    if found == 0:
        raise TraceFileError(f"{path}:{line}: {column}: must be above 0")
    return found


def _whole(value: object) -> int:
    found = int(value) if isinstance(value, str) and value.strip().isascii() else value
    if type(found) is not int or not 0 <= found <= _MAX_TOKENS:
        raise ValueError(f"{value!r} is no number of tokens")
    return found


def _number(value: object) -> float:
    found = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is no time")
    return found


def _azure_ticks(value: object) -> int:
    whole, _, fraction = str(value).strip().partition(".")
    if (fraction and not fraction.isdecimal()) or len(fraction) > 7:
        raise ValueError(f"{value!r} is no time such as 2023-11-16 18:17:03.9799600")
    try:
        at = datetime.strptime(f"{whole} +0000", "%Y-%m-%d %H:%M:%S %z")
    except ValueError:
        raise ValueError(f"{value!r} is no time such as 2023-11-16 18:17:03.9799600") from None
    return int(at.timestamp()) * _AZURE_TICKS + int(fraction.ljust(7, "0"))


class _Times:
    """A column of times, in whatever unit: they may stand still but not go back."""

    def __init__(self, path: Path, column: str) -> None:
        self._path = path
        self._column = column
        self._first: float | None = None
        self._last = 0.0

    def from_first(self, line: int, at: float) -> float:
        """What has passed since the first one; exactly, where the column is of whole numbers."""
        if self._first is None:
            self._first = self._last = at
        if at < self._last:
            raise TraceFileError(f"{self._path}:{line}: {self._column}: is earlier than in the row before it")
        self._last = at
        return at - self._first


def _some(path: Path, rows: list[Row]) -> tuple[Row, ...]:
    if not rows:
        raise TraceFileError(f"{path}: has no requests")
    return tuple(rows)
