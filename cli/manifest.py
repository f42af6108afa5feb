"""What an import wrote, so that a second import can tell that nothing is left to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cli.errors import UserError
from cli.model_source import sha256_of

_NAME = "tandem-manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """Source and outputs of an import."""

    source_sha256: str
    dtype: str
    files: dict[str, str]
    """SHA-256 of each output, by file name."""
    format: int = _FORMAT

    @classmethod
    def of(cls, directory: Path, *, source_sha256: str, dtype: str) -> Manifest:
        """Digests what lies in `directory`."""
        return cls(source_sha256, dtype, {path.name: sha256_of(path) for path in sorted(directory.iterdir()) if path.name != _NAME})

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """None when there is none. Raises UserError for one that is not a manifest of this version."""
        try:
            fields = json.loads((directory / _NAME).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{directory / _NAME}: {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise UserError(f"{directory / _NAME}: not a manifest of format {_FORMAT}; remove the directory to import again")
        return cls(**fields)

    def write(self, directory: Path) -> None:
        """Writes the manifest beside the files it speaks of."""
        (directory / _NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def damaged(self, directory: Path) -> list[str]:
        """Names of files that are missing or differ."""
        return [name for name, digest in self.files.items() if not (directory / name).is_file() or sha256_of(directory / name) != digest]
