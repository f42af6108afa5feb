"""A sweep on disk: <label>.sweep.json, and the runs of its probes beside it."""

from __future__ import annotations

import json
from pathlib import Path

from bench.run_files import RunFileError, file_name, read_run, replace_file
from bench.sweep import Sweep

SUFFIX = ".sweep.json"


def write_sweep(sweep: Sweep, directory: Path, label: str) -> Path:
    """Its probes' runs have been written there by `write_run`. Returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{file_name(label)}{SUFFIX}"
    replace_file(path, json.dumps(sweep.to_json(), indent=1, ensure_ascii=False) + "\n")
    return path


def read_sweep(path: Path) -> Sweep:
    """With the runs of its probes. Raises RunFileError that names the file."""
    try:
        fields = json.loads(path.read_text())
        runs = [read_run(path.with_name(f"{file_name(probe['label'])}.json")) for probe in fields["probes"]]
        return Sweep.from_json(fields, runs)
    except OSError as error:
        raise RunFileError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise RunFileError(f"{path} is no sweep: {type(error).__name__}: {error}") from None
