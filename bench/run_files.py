"""A run on disk: <label>.json with everything but the records, and <label>.jsonl with one record a line."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.record import Record
from bench.run import Generator, Run, Sample

_FORMAT = 1


class RunFileError(Exception):
    """A file that holds no run; the text is for the user."""


def write_run(run: Run, directory: Path) -> Path:
    """Writes both files into `directory`, which is made, and returns the path of the .json one. What was there under this label is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{file_name(run.label)}.json"
    replace_file(path.with_suffix(".jsonl"), "".join(f"{record.to_json()}\n" for record in run.records))
    content: dict[str, Any] = {"format": _FORMAT}
    content |= {name: getattr(run, name) for name in ("label", "target", "plan", "started_at", "duration_s", "environment", "cold_start", "void")}
    content |= {"generator": asdict(run.generator), "samples": [asdict(sample) for sample in run.samples]}
    replace_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def read_run(path: Path) -> Run:
    """Reads the run of which `path` is either file. Raises RunFileError that names the file, and the line of a record."""
    head = path.with_suffix(".json")
    try:
        content: dict[str, Any] = json.loads(head.read_text())
        found = content.pop("format", None)
        if found != _FORMAT:
            raise RunFileError(f"{head} is no run of this version: format {found!r}, expected {_FORMAT}")
        content["generator"] = Generator(**content["generator"])
        content["samples"] = tuple(Sample(**sample) for sample in content["samples"])
        content["void"] = tuple(content["void"])
        return Run(records=_read_records(path.with_suffix(".jsonl")), **content)
    except OSError as error:
        raise RunFileError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunFileError(f"{head} is no run: {type(error).__name__}: {error}") from None


def _read_records(path: Path) -> tuple[Record, ...]:
    records = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                records.append(Record.from_json(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise RunFileError(f"{path}:{number} is no record: {type(error).__name__}: {error}") from None
    return tuple(records)


def file_name(label: str) -> str:
    """The label as a name of a file."""
    return re.sub(r"[^\w.+-]+", "_", label).strip("._") or "run"


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all: one who is interrupted leaves the file of before, and not half of one."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text)
    beside.replace(path)
