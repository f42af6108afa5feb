"""Where a run took place: whatever somebody needs who wants to see the same figures."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("tandem-serve", "grpcio", "protobuf", "aiohttp", "uvloop", "numpy")
_MAX_HEADER_BYTES = 100 << 20
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_SECRET_FLAGS = ("--header", "--api-key")


def environment(
    command: Sequence[str], *, described: Mapping[str, str], model_dir: Path | None = None, cores: Mapping[str, str] | None = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Plain values. `command` as it was typed; `described`: what the target says of itself; `cores`: of each of the server's processes, as the user tells.

    Taken before the run: the load average is that of a machine at rest, or it was none.
    """
    found: dict[str, Any] = {
        "command": shown_command(command),
        "server": dict(described),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count() or 0,
        "generator_cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "cores": dict(cores or {}),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "gpus": _gpus(),
        "tandem_variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("TANDEM_") and not _SECRET.search(name)},
        "notes": list(notes),
    }
    if model_dir is not None:
        found |= {"model_dir": model_dir.name, "model_sha256": model_digest(model_dir)}
    return found


def shown_command(command: Sequence[str]) -> str:
    """As a shell takes it; values of flags that may carry a key are left out."""
    shown: list[str] = []
    for argument in command:
        flag, equals, _ = argument.partition("=")
        if shown and shown[-1] in _SECRET_FLAGS:
            shown.append("...")
        else:
            shown.append(f"{flag}=..." if equals and flag in _SECRET_FLAGS else argument)
    return shlex.join(shown)


def model_digest(directory: Path) -> str:
    """sha256 of the configuration and of the headers of all safetensors files: which model it is, without reading its weights.

    Raises ValueError for a directory without a configuration or with a file that is no safetensors.
    """
    digest = hashlib.sha256()
    config = directory / "config.json"
    if not config.is_file():
        raise ValueError(f"{directory} is no model directory: it has no config.json")
    digest.update(json.dumps(json.loads(config.read_text()), sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"{path} is no safetensors file")
            digest.update(path.name.encode() + b"\0" + file.read(size))
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"unknown: nvidia-smi: {type(error).__name__}"]
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]
