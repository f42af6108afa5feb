"""Compiling a native kernel at its first use, and keeping it."""

from __future__ import annotations

import hashlib
import logging
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from engine.errors import EngineError
from engine.kernels.isa import Isa, compiler_flags

_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi")
_COMPILE_TIMEOUT_S = 300.0
_CPU_KEYS = frozenset({"vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"})


class KernelBuildError(EngineError):
    """Native code cannot be built here; the text says what to do."""


def default_cache_dir() -> Path:
    """`.cache/tandem` in the home directory that the user database names; raises KernelBuildError for a user that it does not know."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "tandem"
    except KeyError as error:
        raise KernelBuildError(f"user {os.getuid()} has no home directory to keep compiled kernels in: set cache_dir") from error


def find_compiler(compiler: str) -> str | None:
    """Path of a C++ compiler given as a command or a path; None if there is none."""
    return shutil.which(compiler)


def build_shared_library(source: Path, cache_dir: Path, compiler: str, isa: Isa = "native") -> Path:
    """Returns the shared library of `source`, compiled if the cache has none for this source, compiler, flags and CPU.

    Several processes may build at once: each writes a name of its own and renames it. Raises KernelBuildError.
    """
    path = find_compiler(compiler)
    if path is None:
        raise KernelBuildError(f"no C++ compiler {compiler!r} found: install one (for instance the package g++)")
    flags = (*_FLAGS, *compiler_flags(isa))
    target = cache_dir / "kernels" / f"{source.stem}-{_key(source, path, flags)}.so"
    _own_directory(target.parent)
    if not target.is_file():
        _compile(source, target, path, flags)
    return target


def _compile(source: Path, target: Path, compiler: str, flags: tuple[str, ...]) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        try:
            done = subprocess.run([compiler, *flags, str(source), "-o", str(built)], capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelBuildError(f"{compiler}: {error}") from error
        if done.returncode != 0:
            raise KernelBuildError(f"{compiler} failed on {source.name}: {done.stderr[-2000:].strip()}")
        os.replace(built, target)
    _log.info("compiled %s in %.1f s", target.name, time.monotonic() - started)


def _key(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{compiler}: {error}") from error
    for part in (compiler.encode(), version, " ".join(flags).encode(), _cpu().encode()):
        digest.update(b"\0" + part)
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What -march=native depends on, so that a cache folder on a shared disk serves unlike machines."""
    first_processor = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    return "\n".join(line for line in first_processor.splitlines() if line.split(":", 1)[0].strip() in _CPU_KEYS)


def _own_directory(directory: Path) -> None:
    """Code is loaded from here, so nobody else may write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(f"{directory}: {error.strerror}: set cache_dir to a directory of your own") from error
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(f"{directory} belongs to another user or others may write to it: set cache_dir to a directory of your own")
